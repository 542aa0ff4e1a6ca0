"""What the dashboard sees of a forward pass: losses, residual stream, attention scores, time of the blocks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lm.attention import Packing
from lm.loss import IGNORE
from lm.model import GQA, Llama
from lm.scores import largest_scores
from plugins.callbacks.tally import Tally


class ForwardWatch:
    """Looks at one micro-batch between `install` and `remove`. Changes nothing of what is computed.

    Args:
        model: of the run.
        n_sources: number of data sources; 0 where batches do not name theirs.

    Attributes:
        seconds: this rank spent in its blocks' forward since it was last set to 0, without waiting for parameters.
    """

    def __init__(self, model: Llama, n_sources: int):
        self.model = model
        self.n_sources = n_sources
        self.seconds = 0.0
        self._layers: list[GQA] = [module for module in model.modules() if isinstance(module, GQA)]
        self._indices = {id(layer): index for index, layer in enumerate(self._layers)}
        self._batch: Mapping[str, Any] = {}
        self._tally: Tally | None = None
        self._rows: list[int] = []
        self._handle: Any = None
        self._began: Any = None
        self._events: list[tuple[Any, Any]] = []

    def sums(self) -> dict[str, int]:
        """Lengths of the vectors that are summed, for Tally."""
        return {
            **dict.fromkeys(("source_nll", "source_tokens"), self.n_sources),
            **dict.fromkeys(("nll", "tokens", "logsumexp", "residual_count"), 1),
            "residual": len(self._layers) + 1,
        }

    def maxima(self) -> dict[str, int]:
        """Lengths of the vectors whose maximum counts."""
        return {"logit": len(self._layers)}

    def install(self, batch: Mapping[str, Any], tally: Tally, rows: list[int]) -> None:
        """Watch the next forward pass.

        Args:
            rows: windows of the micro-batch whose attention scores are looked at.
        """
        self._batch, self._tally, self._rows = batch, tally, rows
        self._handle = self.model.register_forward_hook(self._see_losses, with_kwargs=True)
        self.model.watch_residual = self._see_residual
        # They stay until after backward: with activation checkpointing the forward there must be the same one.
        for layer in self._layers if rows else ():
            layer.watch_scores.append(self._see_scores)

    def remove(self) -> None:
        """Stop watching; after backward."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = self._tally = self.model.watch_residual = None
        for layer in self._layers if self._rows else ():
            layer.watch_scores.remove(self._see_scores)

    def take_seconds(self) -> float:
        """`seconds`, set back to 0. Waits for the forward pass on the device."""
        if self._events:
            self._events[-1][1].synchronize()
            self.seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000
            self._events.clear()
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    @torch.no_grad()
    def _see_losses(self, model: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        tally = self._tally
        labels = kwargs.get("labels", args[2] if len(args) > 2 else None)
        if tally is None or labels is None:
            return
        nll, logsumexp = output if isinstance(output, tuple) else (output, None)
        labelled = labels != IGNORE
        nll_B, tokens_B = nll.detach().double().sum(1), labelled.sum(1).double()
        tally["nll"].add_(nll_B.sum())
        tally["tokens"].add_(tokens_B.sum())
        if self.n_sources:
            tally["source_nll"].index_add_(0, self._batch["source"], nll_B)
            tally["source_tokens"].index_add_(0, self._batch["source"], tokens_B)
        if logsumexp is not None:
            tally["logsumexp"].add_((logsumexp.detach() * labelled).sum(dtype=torch.float64))

    @torch.no_grad()
    def _see_residual(self, index: int, x_BTD: Tensor) -> None:
        if self._tally is None:
            return
        if index > 0:
            self._end_block()
        # By rows: one long sum of squares in fp32 would lose digits.
        norms = torch.linalg.vector_norm(x_BTD.detach(), dim=-1, dtype=torch.float32)
        self._tally["residual"][index].add_(norms.double().square_().sum())
        if index == 0:
            self._tally["residual_count"].add_(x_BTD.numel())
        if index < len(self._layers):
            self._begin_block(index, x_BTD.device)

    @torch.compiler.disable
    def _see_scores(self, layer: GQA, q: Tensor, k: Tensor, packing: Packing) -> None:
        # The same operations in the forward pass and in a second one for backward: selective checkpointing hands out
        # kept results of matrix products in their order. A maximum may be taken twice.
        tally = self._tally
        if tally is not None:
            largest = largest_scores(q.detach(), k.detach(), packing, layer.scale, self._rows).max()
            seen = tally["logit"][self._indices[id(layer)]]
            seen.copy_(torch.maximum(seen, largest.double()))

    def _begin_block(self, index: int, device: torch.device) -> None:
        block = self.model.blocks[index]
        if isinstance(block, FSDPModule):
            block.unshard()  # so that waiting for the parameters of others is not this rank's time
        if device.type == "cuda":
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()
        else:
            self._began = time.perf_counter()

    def _end_block(self) -> None:
        if isinstance(self._began, float):
            self.seconds += time.perf_counter() - self._began
        else:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._events.append((self._began, end))
