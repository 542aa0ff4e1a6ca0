"""Context parallelism: the positions of a window spread over n processes (DeepSpeed-Ulysses: Jacobs et al. 2023,
arXiv 2309.14509, sec. 3.1).

Each process holds T/n neighbouring positions of every window outside attention, and H/n heads of all T positions inside
it; an all-to-all on either side of attention turns the one into the other.

Letters: B batch, T positions, t = T/n, H query heads, K key-value heads, E head size, n processes of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lm.config import ModelConfig
from lm.errors import ConfigError


@dataclass(frozen=True)
class ContextGroup:
    """Processes that work on the same windows, as one of them sees it.

    Attributes:
        group: their process group; rank i of it holds positions i t to (i + 1) t.
        rank: this process's rank in it.
        size: n.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """This process's positions of a tensor that has all of them along `dim`; a view.

        Raises:
            ConfigError: T does not divide by n.
        """
        check_length(x.shape[dim], self.size)
        t = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * t, t)

    def whole(self, x_Bt: Tensor) -> Tensor:
        """[B, T, ...] from the [B, t, ...] of all processes, the same on each. Collective.

        Going backward each process takes the gradient of its own positions, times n: what follows is computed alike on
        all n, so that is the sum over them of the gradients that would come back. The mean of parameter gradients
        over data-parallel ranks times n processes is then the mean over data-parallel ranks, without another exchange.
        """
        whole: Tensor = _Gather.apply(x_Bt, self.group, self.rank, self.size)
        return whole

    def to_heads(self, q_BtHE: Tensor, k_BtKE: Tensor, v_BtKE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From some positions of all heads to all positions of some heads, in one all-to-all. Collective.

        Where n > K each key-value head goes to the n / K processes whose query heads read it.

        Returns:
            q [B, T, H/n, E]; k, v [B, T, K/n or 1, E].
        """
        copies = max(1, self.size // k_BtKE.shape[2])
        if copies > 1:
            k_BtKE, v_BtKE = (x.repeat_interleave(copies, dim=2) for x in (k_BtKE, v_BtKE))
        parts = [x.unflatten(2, (self.size, -1)) for x in (q_BtHE, k_BtKE, v_BtKE)]  # [B, t, n, heads for each, E]
        n_heads = [part.shape[3] for part in parts]
        to_nBthE = torch.cat(parts, dim=3).movedim(2, 0)
        got_BThE = _exchange(to_nBthE, self.group).movedim(0, 1).flatten(1, 2)
        q, k, v = got_BThE.split(n_heads, dim=2)
        return q, k, v

    def to_positions(self, x_BThE: Tensor) -> Tensor:
        """The way back: [B, T, (H/n) E] of these heads to [B, t, H E] of these positions. Collective."""
        to_nBthE = x_BThE.unflatten(1, (self.size, -1)).movedim(1, 0)
        return _exchange(to_nBthE, self.group).movedim(0, 2).flatten(2, 3)


def check_heads(config: ModelConfig, context_parallel: int, tensor_parallel: int = 1) -> None:
    """Raise ConfigError, one line, where heads cannot be dealt out evenly over context_parallel processes.

    Args:
        tensor_parallel: devices that have cut the heads before; it divides both counts of heads.
    """
    n_heads, n_kv_heads = config.n_heads // tensor_parallel, config.n_kv_heads // tensor_parallel
    share = f" / tensor_parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    if n_heads % context_parallel:
        raise ConfigError(
            f"model.config.n_heads {config.n_heads}{share} does not divide by context_parallel {context_parallel}; "
            "change one of them"
        )
    if n_kv_heads % context_parallel and context_parallel % n_kv_heads:
        raise ConfigError(
            f"model.config.n_kv_heads {config.n_kv_heads}{share} neither divides by context_parallel "
            f"{context_parallel} nor divides it; change one of them"
        )


def check_length(sequence_length: int, context_parallel: int) -> None:
    """Raise ConfigError, one line, where a window does not divide."""
    if sequence_length % context_parallel:
        raise ConfigError(
            f"sequence_length {sequence_length} does not divide by context_parallel {context_parallel}; "
            "change one of them"
        )


class _AllToAll(torch.autograd.Function):
    """x[j] of process i becomes y[i] of process j. Its own transpose, so backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(x_n: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, ...]: x[j] goes to process j, what comes from process i is at i. gloo and NCCL, any dtype."""
    received: Tensor = _AllToAll.apply(x_n.contiguous(), group)
    return received


class _Gather(torch.autograd.Function):
    """See ContextGroup.whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, rank: int, size: int) -> Tensor:
        ctx.rank, ctx.size, ctx.t = rank, size, x.shape[1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(1, ctx.rank * ctx.t, ctx.t) * ctx.size, None, None, None
