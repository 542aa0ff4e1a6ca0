"""The numbers that a step is judged by, equal on all ranks by construction."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.strategies import collectives


def agree(norm: Tensor, loss: Any) -> tuple[float, float]:
    """(gradient norm, mean of the ranks' losses) as the same two floats on every rank. Collective.

    Every rank gets the table of what all ranks hold and reads it in the same order, so that ranks whose norms differ
    in the last bit (or because one of them is broken) still decide alike: the largest norm counts, and a value that is
    not finite on any rank is not finite for all. One gather of two floats a rank and one read by the host a step.

    Args:
        norm: global gradient norm, 0-dimensional.
        loss: this rank's loss of the whole step, 0-dimensional or a number; ranks weigh the same.
    """
    mine = torch.stack([norm.detach().float(), torch.as_tensor(loss, device=norm.device).detach().float()])
    table = mine
    if collectives.is_distributed():
        table = mine.new_empty(2 * collectives.world_size())  # flat: gloo takes no other shape
        dist.all_gather_into_tensor(table, mine)
    values = table.tolist()
    return _worst(values[::2]), _mean(values[1::2])


def _worst(norms: list[float]) -> float:
    return next((value for value in norms if not math.isfinite(value)), max(norms))


def _mean(losses: list[float]) -> float:
    bad = next((value for value in losses if not math.isfinite(value)), None)
    return math.fsum(losses) / len(losses) if bad is None else bad
