"""Which rank is slow, and keeps being slow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


class Stragglers:
    """Counts for each rank how often in a row it took longer than the others.

    Args:
        factor: times the median of all ranks that count as slow; above 1.
        patience: observations in a row until the rank is named, and again as many until it is named anew.
    """

    def __init__(self, factor: float, patience: int):
        self.factor = factor
        self.patience = patience
        self._in_a_row: dict[int, int] = {}

    def see(self, seconds: Sequence[float]) -> list[int]:
        """Ranks to be named now.

        Args:
            seconds: each rank's own work in a step.
        """
        # Of two ranks the median would be half the slow one's own: the faster one is the measure.
        usual = statistics.median_low(seconds)
        named = []
        for rank, own in enumerate(seconds):
            slow = own > self.factor * usual
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if slow else 0
            if slow and self._in_a_row[rank] % self.patience == 0:
                named.append(rank)
        return named
