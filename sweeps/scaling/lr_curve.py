"""One curve of loss against learning rate, as arrays, and the parabola through its lowest part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeps.scaling.table import Array

MIN_RATES = 3
COMPLETE = "complete"


@dataclass(frozen=True)
class LrRun:
    """One run. loss in nats per token, NaN without one; status complete, diverged, stopped, failed or missing."""

    param: str
    width: int
    batch_tokens: int
    lr: float
    seed: int
    loss: float
    status: str = COMPLETE


class Curve:
    """The complete runs of one curve, as arrays.

    Attributes:
        x: [rates] ascending ln LR.
        rate, seed: [runs] index into x; index of the seed.
        loss: [runs].
    """

    def __init__(self, runs: Sequence[LrRun]):
        whole = [run for run in runs if run.status == COMPLETE and math.isfinite(run.loss)]
        self.x, self.rate = np.unique([math.log(run.lr) for run in whole], return_inverse=True)
        seeds, self.seed = np.unique([run.seed for run in whole], return_inverse=True)
        self.n_seeds = len(seeds)
        self.loss = np.array([run.loss for run in whole], dtype=float)

    def seed_columns(self, rows: NDArray[np.int_]) -> Array:
        """[rows, seeds] 0 or 1; seeds without a row are left out."""
        columns = (self.seed[rows, None] == np.arange(self.n_seeds)).astype(float)
        return columns[:, columns.any(axis=0)]

    def noise(self) -> tuple[float, int]:
        """(sum of squares of ln loss, degrees of freedom) left of level(seed) + level(rate); (0, 0) of one seed."""
        if self.n_seeds < 2:
            return 0.0, 0
        rates = (self.rate[:, None] == np.arange(len(self.x))).astype(float)
        design = np.concatenate([self.seed_columns(np.arange(len(self.rate))), rates], axis=1)
        log_loss = np.log(self.loss)
        left = log_loss - design @ np.linalg.lstsq(design, log_loss, rcond=None)[0]
        return float(left @ left), len(self.loss) - int(np.linalg.matrix_rank(design))

    def rate_means(self, loss: Array) -> Array:
        """[replicates, runs] -> [replicates, rates] mean over seeds, their levels taken out."""
        rates = (self.rate[:, None] == np.arange(len(self.x))).astype(float)
        if self.n_seeds > 1:
            seeds = self.seed_columns(np.arange(len(self.rate)))
            design = np.concatenate([rates, seeds - seeds.mean(axis=0)], axis=1)
            return np.asarray((loss @ np.linalg.pinv(design).T)[:, : len(self.x)])
        return np.asarray(loss @ (rates / rates.sum(axis=0)))

    def windows(self, means: Array, near: int) -> tuple[Array, Array]:
        """First and last rate ([replicates] each) of the parabola: neighbours of the lowest, then the lower side."""
        rows, last = np.arange(len(means)), means.shape[1] - 1
        lowest = means.argmin(axis=1)
        first, end = np.maximum(lowest - 1, 0), np.minimum(lowest + 1, last)
        for _ in range(near - MIN_RATES):
            left = np.where(first > 0, means[rows, np.maximum(first - 1, 0)], np.inf)
            right = np.where(end < last, means[rows, np.minimum(end + 1, last)], np.inf)
            go_left = (left < right) & np.isfinite(left)
            go_right = ~go_left & np.isfinite(right)
            first, end = first - go_left, end + go_right
        return first, end

    def parabolas(self, loss: Array, near: int) -> tuple[Array, Array, Array, Array]:
        """Parabolas of [replicates, runs] losses.

        Returns:
            (coefficients [replicates, 3] as (q2, q1, q0), first and last rate, lowest rate); all [replicates, ...].
        """
        means = self.rate_means(loss)
        first, end = self.windows(means, near)
        coefficients = np.full((len(loss), 3), np.nan)
        for lo, hi in {(int(a), int(b)) for a, b in zip(first, end, strict=True)}:
            if hi - lo + 1 < MIN_RATES:
                continue
            which = (first == lo) & (end == hi)
            rows = np.flatnonzero((self.rate >= lo) & (self.rate <= hi))
            seeds = self.seed_columns(rows)
            x = self.x[self.rate[rows]] - self.x[lo : hi + 1].mean()
            solution = loss[which][:, rows] @ np.linalg.pinv(np.stack([x**2, x, *seeds.T], axis=1)).T
            q2, q1, q0 = solution[:, 0], solution[:, 1], solution[:, 2:].mean(axis=1)
            shift = self.x[lo : hi + 1].mean()
            coefficients[which] = np.stack([q2, q1 - 2 * q2 * shift, q0 - q1 * shift + q2 * shift**2], axis=1)
        return coefficients, first, end, means.argmin(axis=1)

    def vertices(self, loss: Array, near: int) -> Array:
        """[replicates] ln LR*; NaN where the parabola is refused."""
        coefficients, first, end, lowest = self.parabolas(loss, near)
        with np.errstate(divide="ignore", invalid="ignore"):
            vertex = -coefficients[:, 1] / (2 * coefficients[:, 0])
            good = (coefficients[:, 0] > 0) & (vertex >= self.x[first]) & (vertex <= self.x[end])
        good &= (lowest > 0) & (lowest < len(self.x) - 1)
        return np.where(good, vertex, np.nan)
