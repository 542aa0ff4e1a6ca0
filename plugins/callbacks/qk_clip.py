"""QK-clip (MuonClip: Kimi K2, arXiv 2507.20534, sec. 2.1): no attention score grows far past a threshold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lm.attention import Packing
from lm.errors import ConfigError
from lm.model import GQA
from lm.scores import largest_scores
from plugins.callbacks.step_end import ends_step


class QKClip(Callback):
    """After a step in which a head's largest score S exceeded the threshold, shrinks what makes its scores.

    Query and key matrix of the head are multiplied by sqrt(threshold / S) each, so that the same input gives the
    threshold. Query heads that share a key head (GQA) are taken together, by the largest S among them: else the shared
    keys would have to shrink while the other heads' queries grow. Momenta stay as they are.

    Records `max_attention_score`, the largest of the step over all layers and ranks, at every logged step.

    Args:
        threshold: tau; 100 in the paper.

    Attributes:
        largest: [L, H] fp32, the last step's largest score of each head, over the global batch; None before the first.
        clipped_steps: steps after which something was shrunk.
    """

    def __init__(self, threshold: float = 100.0):
        if not threshold > 0:
            raise ConfigError(f"qk_clip: threshold must be positive, got {threshold}")
        self.threshold = threshold
        self.largest: Tensor | None = None
        self.clipped_steps = 0
        self._layers: list[GQA] = []
        self._indices: dict[int, int] = {}
        self._seen: list[list[Tensor]] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._layers = [module for module in pl_module.modules() if isinstance(module, GQA)]
        if any(layer.q_norm is not None for layer in self._layers):
            raise ConfigError("qk_clip has no effect with model.config.qk_norm, which bounds scores itself; drop one")
        self._seen = [[] for _ in self._layers]
        for index, layer in enumerate(self._layers):
            self._indices[id(layer)] = index
            layer.watch_scores.append(self._watch)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        for layer in self._layers:
            layer.watch_scores.remove(self._watch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not ends_step(trainer, batch_idx):
            return
        self.largest = self._reduced(*getattr(trainer.strategy, "head_part", (0, 1)))
        shrink = group_factors(self.largest, self.threshold, self._layers[0].wk.out_features // self._layers[0].d_head)
        if bool((shrink < 1).any()) and not getattr(trainer.strategy, "skipped", False):  # a skip leaves weights alone
            self.clipped_steps += 1
            scale = getattr(trainer.strategy, "scale_rows", scale_rows)
            scale([item for layer, row in zip(self._layers, shrink, strict=True) for item in row_factors(layer, row)])
        record = getattr(pl_module, "record", None)
        if record is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            record({"max_attention_score": float(self.largest.max())})

    @torch.compiler.disable
    def _watch(self, layer: GQA, q: Tensor, k: Tensor, packing: Packing) -> None:
        if layer.training:
            # No arithmetic here: under selective checkpointing forward and its repetition must do the same.
            scores = largest_scores(q.detach(), k.detach(), packing, layer.scale)
            self._seen[self._indices[id(layer)]].append(scores)

    def _reduced(self, part: int, parts: int) -> Tensor:
        """[L, H] over micro-batches and ranks; forgets what was seen. Collective.

        Args:
            part, parts: this rank has seen part `part` of `parts` of each layer's heads.
        """
        seen = torch.stack([torch.stack(scores).amax(dim=0) for scores in self._seen])
        for scores in self._seen:
            scores.clear()
        largest = torch.full((len(seen), seen.shape[1] * parts), -torch.inf, device=seen.device)
        largest.chunk(parts, dim=1)[part].copy_(seen)
        if dist.is_initialized():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest


def group_factors(largest: Tensor, threshold: float, n_kv_heads: int) -> Tensor:
    """[L, K] factor on the scores of each group of heads, 1 where none of them passed the threshold.

    Args:
        largest: [L, H]; what is not finite belongs to a step that was skipped and counts as 1.
    """
    worst = largest.unflatten(1, (n_kv_heads, -1)).amax(dim=2)
    return torch.where(torch.isfinite(worst) & (worst > threshold), threshold / worst, torch.ones_like(worst))


def row_factors(layer: GQA, shrink: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(matrix, factor of each of its rows) of a layer whose groups' scores are to be multiplied by `shrink`, [K]."""
    root = shrink.sqrt()
    shared = layer.wq.out_features // layer.wk.out_features
    return [
        (layer.wq.weight, root.repeat_interleave(shared * layer.d_head)),
        (layer.wk.weight, root.repeat_interleave(layer.d_head)),
    ]


@torch.no_grad()
def scale_rows(items: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply each row of each matrix, whole or a DTensor, by its factor; every rank knows all factors."""
    for parameter, factor in items:
        whole = factor[:, None].to(parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = whole.expand(parameter.shape).contiguous()
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(whole.to(parameter.device))  # which is not the mesh's when parameters are offloaded
