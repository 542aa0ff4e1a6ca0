"""The global gradient norm of ordinary and sharded gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def optimized_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Parameters that have a gradient now."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def global_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all gradients as one vector: 0-dimensional, fp32, equal on all ranks.

    Collective when gradients are sharded: each rank squares its part and the parts are summed.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm(gradients, norm_type=2.0)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm.detach().float()


def clip_to_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place by min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, arXiv 1211.5063, sec. 3.2).

    Args:
        norm: from global_norm, so that it is not computed twice.
    """
    torch.nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)
