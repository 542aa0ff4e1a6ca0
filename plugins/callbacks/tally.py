"""Sums and maxima of this rank that become those of the run in two exchanges and one read by the host."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Tally:
    """Named vectors in fp64 on a device, all zero (sums) or -inf (maxima) at first, the same on every rank.

    Args:
        sums, maxima: length of each vector by name.
        device: of the vectors.
    """

    def __init__(self, sums: dict[str, int], maxima: dict[str, int], device: torch.device):
        self._lengths = [*sums.items(), *maxima.items()]
        self._sums = torch.zeros(sum(sums.values()), dtype=torch.float64, device=device)
        self._maxima = torch.full((sum(maxima.values()),), -torch.inf, dtype=torch.float64, device=device)
        views = [*self._sums.split(list(sums.values())), *self._maxima.split(list(maxima.values()))]
        self._views = dict(zip([*sums, *maxima], views, strict=True))

    def __getitem__(self, name: str) -> Tensor:
        """The vector itself, to be changed in place."""
        return self._views[name]

    def add(self, name: str, indices: list[int], values: list[Tensor]) -> None:
        """Add 0-dimensional values, each at its index."""
        if values:
            target = self._views[name]
            places = torch.tensor(indices, device=target.device)
            target.index_add_(0, places, torch.stack(values).to(target))

    def reduced(self) -> dict[str, list[float]]:
        """The vectors over all ranks. Collective; the one place that waits for the device."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._sums)
            dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        numbers = torch.cat([self._sums, self._maxima]).tolist()
        values, start = {}, 0
        for name, length in self._lengths:
            values[name] = numbers[start : start + length]
            start += length
        return values
