"""Best learning rate of each curve of loss against learning rate: a parabola in ln LR near the lowest point.

A curve is one (parametrisation, width, batch). Per seed the curve may lie higher or lower; its place in ln LR is shared:
loss = level(seed) + q1 x + q2 x^2 with x = ln LR, by least squares, and LR* = exp(-q1 / (2 q2)).

Only runs that reached their end count: a diverged or stopped run has no loss at that length. Refused, with the reason:
fewer than 3 rates, the lowest loss at the first or last of them, a parabola that opens downwards, a vertex outside the
rates it went through.

Intervals are percentiles of a noise bootstrap: the design stays, fitted losses (own ones outside the parabola) are
redrawn times exp(noise), and rates near the minimum are chosen anew. The sd of ln loss comes from repeated seeds where
there are any (what is left of a model level(seed) + level(rate)), else from the parabolas' residuals, pooled over all
curves; each replicate draws the sd itself (sd^2 dof / chi2), so few degrees of freedom give wide intervals. What the
parabola misses because the true curve is not symmetric is in the residuals, not corrected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sweeps.scaling.bootstrap import interval
from sweeps.scaling.table import Array, FitError

NEAREST = 4
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


@dataclass(frozen=True)
class Optimum:
    """Of one curve.

    Attributes:
        param, width, batch_tokens: which.
        lr: vertex; NaN when refused. low, high: its 95% interval, NaN without one.
        loss: at the vertex, mean over seeds.
        best_lr: the rate of the grid with the lowest mean loss; NaN without any.
        used: rates that the parabola went through.
        coefficients: (q2, q1, q0) of loss = q2 x^2 + q1 x + q0, x = ln LR, q0 the mean over seeds.
        edge: low or high when the lowest loss is at that end of the rates, else empty.
        reason: why the curve was refused, empty when it was not.
        samples: [replicates] bootstrap values of ln LR*, NaN where refused.
    """

    param: str
    width: int
    batch_tokens: int
    lr: float = math.nan
    low: float = math.nan
    high: float = math.nan
    loss: float = math.nan
    best_lr: float = math.nan
    used: tuple[float, ...] = ()
    coefficients: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    edge: str = ""
    reason: str = ""
    samples: Array = field(default_factory=lambda: np.empty(0), repr=False, compare=False)

    @property
    def ok(self) -> bool:
        return not self.reason

    def at(self, lr: Array) -> Array:
        """The parabola's loss, [...] -> [...]."""
        x = np.log(lr)
        q2, q1, q0 = self.coefficients
        return (q2 * x + q1) * x + q0


@dataclass(frozen=True)
class Noise:
    """Spread of ln loss between equal runs: sd, its degrees of freedom, and where it comes from."""

    sd: float
    dof: int
    source: str


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

    def seed_columns(self, rows: Array) -> Array:
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


def fit_optimum(runs: Sequence[LrRun], near: int = NEAREST) -> tuple[Optimum, Curve]:
    """Fits one curve, without an interval.

    Args:
        runs: of one parametrisation, width and batch, whatever their status.
        near: rates that the parabola goes through, at least 3: the lowest, its neighbours, then the lower side.
    """
    first = runs[0]
    curve = Curve(runs)
    named = {"param": first.param, "width": first.width, "batch_tokens": first.batch_tokens}
    if len(curve.x) < MIN_RATES:
        best = float(np.exp(curve.x[curve.rate_means(curve.loss[None])[0].argmin()])) if len(curve.x) else math.nan
        reason = f"{len(curve.x)} rates have a loss, a parabola needs {MIN_RATES}"
        return Optimum(**named, best_lr=best, reason=reason), curve  # type: ignore[arg-type]
    coefficients, lo, hi, lowest = (part[0] for part in curve.parabolas(curve.loss[None], near))
    best = float(np.exp(curve.x[lowest]))
    edge, reason = _refusal(runs, curve, coefficients, lo, hi, lowest)
    if reason:
        return Optimum(**named, best_lr=best, edge=edge, reason=reason), curve  # type: ignore[arg-type]
    vertex = float(-coefficients[1] / (2 * coefficients[0]))
    optimum = Optimum(
        **named,  # type: ignore[arg-type]
        lr=math.exp(vertex),
        loss=float((coefficients[0] * vertex + coefficients[1]) * vertex + coefficients[2]),
        best_lr=best,
        used=tuple(float(lr) for lr in np.exp(curve.x[lo : hi + 1])),
        coefficients=(float(coefficients[0]), float(coefficients[1]), float(coefficients[2])),
    )
    return optimum, curve


def _refusal(runs: Sequence[LrRun], curve: Curve, q: Array, lo: int, hi: int, lowest: int) -> tuple[str, str]:
    """(edge, reason), both empty for a curve whose parabola holds."""
    lr = float(np.exp(curve.x[lowest]))
    if lowest in (0, len(curve.x) - 1):
        edge = "low" if lowest == 0 else "high"
        beyond = sorted({r.status for r in runs if r.status != COMPLETE and (r.lr < lr if edge == "low" else r.lr > lr)})
        which = {"low": "lowest", "high": "highest"}[edge]
        why = f" (beyond it: {', '.join(beyond)})" if beyond else f"; add {'lower' if edge == 'low' else 'higher'} rates"
        return edge, f"the lowest loss is at the {which} rate that has one, {lr:.3g}{why}"
    if not q[0] > 0:
        return "", "the parabola opens downwards"
    vertex = -q[1] / (2 * q[0])
    if not curve.x[lo] <= vertex <= curve.x[hi]:
        return "", f"the vertex, {math.exp(min(vertex, 700)):.3g}, is outside the rates of the parabola"
    return "", ""


def pooled_noise(fits: Iterable[tuple[Optimum, Curve]]) -> Noise | None:
    """Noise of ln loss over all curves; None when nothing is left over to estimate it from."""
    fits = list(fits)
    parts = [curve.noise() for _, curve in fits]
    source = "repeated seeds"
    if sum(dof for _, dof in parts) == 0:
        source = "residuals of the parabolas"
        parts = [_residuals(optimum, curve) for optimum, curve in fits if optimum.ok]
    squares, dof = sum(part[0] for part in parts), sum(part[1] for part in parts)
    return Noise(math.sqrt(squares / dof), dof, source) if dof else None


def _residuals(optimum: Optimum, curve: Curve) -> tuple[float, int]:
    rows = np.flatnonzero(np.isin(curve.rate, _used(optimum, curve)))
    left = np.log(curve.loss[rows] / optimum.at(np.exp(curve.x[curve.rate[rows]])))
    return float(left @ left), len(rows) - 3


def _used(optimum: Optimum, curve: Curve) -> Array:
    return np.flatnonzero(np.isclose(curve.x[:, None], np.log(optimum.used)[None]).any(axis=1))


def bootstrap_optimum(
    optimum: Optimum, curve: Curve, noise: Noise, replicates: int, generator: np.random.Generator, near: int = NEAREST
) -> Array:
    """[replicates] ln LR* of redrawn curves; NaN where one is refused."""
    fitted = curve.loss.copy()
    rows = np.flatnonzero(np.isin(curve.rate, _used(optimum, curve)))
    design = np.concatenate(
        [np.stack([curve.x[curve.rate[rows]] ** 2, curve.x[curve.rate[rows]]], axis=1), curve.seed_columns(rows)], axis=1
    )
    fitted[rows] = design @ np.linalg.lstsq(design, curve.loss[rows], rcond=None)[0]
    sd = noise.sd * np.sqrt(noise.dof / generator.chisquare(noise.dof, replicates))
    draws = generator.standard_normal((replicates, len(fitted))) * sd[:, None]
    return curve.vertices(fitted * np.exp(draws), near)


def fit_curves(
    runs: Sequence[LrRun], near: int = NEAREST, replicates: int = 2000, seed: int = 0, noise_sd: float | None = None
) -> tuple[tuple[Optimum, ...], Noise | None]:
    """Fits every curve of a table, with intervals.

    Args:
        near: see fit_optimum.
        replicates: of the bootstrap; 0 for no intervals.
        noise_sd: of ln loss, where it is known; None estimates it.

    Raises:
        FitError: no runs, or `near` below 3.
    """
    if not runs:
        raise FitError("no runs to find a learning rate from")
    if near < MIN_RATES:
        raise FitError(f"near must be at least {MIN_RATES}, a parabola's points, got {near}")
    groups: dict[tuple[str, int, int], list[LrRun]] = {}
    for run in runs:
        groups.setdefault((run.param, run.batch_tokens, run.width), []).append(run)
    fits = [fit_optimum(groups[key], near) for key in sorted(groups)]
    noise = Noise(noise_sd, 10**6, "given") if noise_sd is not None else pooled_noise(fits)
    generator = np.random.default_rng(seed)
    optima = []
    for optimum, curve in fits:
        if optimum.ok and noise and replicates:
            samples = bootstrap_optimum(optimum, curve, noise, replicates, generator, near)
            ends = interval(samples)
            optimum = _with_interval(optimum, samples, ends.low, ends.high)
        optima.append(optimum)
    return tuple(optima), noise


def _with_interval(optimum: Optimum, samples: Array, low: float, high: float) -> Optimum:
    return replace(optimum, samples=samples, low=math.exp(low), high=math.exp(high))
