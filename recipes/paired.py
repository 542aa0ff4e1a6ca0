"""Two settings compared by runs that share a seed: the difference, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BETTER, WORSE, OPEN, UNKNOWN, MISSING = (
    "better", "worse", "not told apart", "noise unknown", "no seed in common",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """One setting's loss less the other's, seed by seed; lower is better.

    Attributes:
        mean: over the seeds that both have; NaN without one.
        low, high: 95% interval of the mean, Student's t on the seeds' differences; NaN with fewer than two.
        by_seed: (seed, difference).
    """

    mean: float
    low: float
    high: float
    by_seed: tuple[tuple[int, float], ...]

    @property
    def word(self) -> str:
        """better, worse, not told apart, noise unknown, or no seed in common."""
        if not self.by_seed:
            return MISSING
        if math.isnan(self.low):
            return UNKNOWN
        return BETTER if self.high < 0 else WORSE if self.low > 0 else OPEN


def paired(differences: Sequence[tuple[int, float]]) -> Difference:
    """Mean of (seed, difference) pairs and its 95% interval: mean +- t(.975, n - 1) s / sqrt(n)."""
    from scipy.stats import t as student

    values = np.array([value for _, value in differences])
    if not len(values):
        return Difference(math.nan, math.nan, math.nan, ())
    mean = float(values.mean())
    if len(values) < 2:
        return Difference(mean, math.nan, math.nan, tuple(differences))
    half = float(student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return Difference(mean, mean - half, mean + half, tuple(differences))
