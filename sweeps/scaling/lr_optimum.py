"""Best learning rate of each curve of loss against learning rate: a parabola in ln LR near the lowest point.

A curve is one (parametrisation, width, batch). A seed lifts or lowers all of it and does not move it in ln LR:
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
from numpy.typing import NDArray

from sweeps.scaling.bootstrap import Noise, draw_sd, given_noise, interval
from sweeps.scaling.lr_curve import COMPLETE, MIN_RATES, Curve, LrRun
from sweeps.scaling.table import Array, FitError

NEAREST = 4


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
        side = -1 if edge == "low" else 1
        beyond = sorted({run.status for run in runs if run.status != COMPLETE and side * (run.lr - lr) > 0})
        why = f" (beyond it: {', '.join(beyond)})" if beyond else f"; add {edge}er rates"
        return edge, f"the lowest loss is at the {edge}est rate that has one, {lr:.3g}{why}"
    if not q[0] > 0:
        return "", "the parabola opens downwards"
    vertex = -q[1] / (2 * q[0])
    if not curve.x[lo] <= vertex <= curve.x[hi]:
        return "", f"the vertex, {math.exp(min(vertex, 700)):.3g}, is outside the rates of the parabola"
    return "", ""


def pooled_noise(fits: Iterable[tuple[Optimum, Curve]]) -> Noise | None:
    """Noise of ln loss over all curves; None when nothing is left over to estimate it from."""
    fits = list({curve.loss.tobytes(): (optimum, curve) for optimum, curve in fits}.values())  # shared runs count once
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


def _used(optimum: Optimum, curve: Curve) -> NDArray[np.int_]:
    return np.flatnonzero(np.isclose(curve.x[:, None], np.log(optimum.used)[None]).any(axis=1))


def bootstrap_optimum(
    optimum: Optimum, curve: Curve, noise: Noise, replicates: int, generator: np.random.Generator, near: int = NEAREST
) -> Array:
    """[replicates] ln LR* of redrawn curves; NaN where one is refused."""
    fitted = curve.loss.copy()
    rows = np.flatnonzero(np.isin(curve.rate, _used(optimum, curve)))
    x = curve.x[curve.rate[rows]]
    design = np.stack([x**2, x, *curve.seed_columns(rows).T], axis=1)
    fitted[rows] = design @ np.linalg.lstsq(design, curve.loss[rows], rcond=None)[0]
    sd = draw_sd(noise, replicates, generator)
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
    noise = given_noise(noise_sd) or pooled_noise(fits)
    generator = np.random.default_rng(seed)
    optima = []
    for optimum, curve in fits:
        if optimum.ok and noise and replicates:
            samples = bootstrap_optimum(optimum, curve, noise, replicates, generator, near)
            ends = interval(samples)
            optimum = replace(optimum, samples=samples, low=math.exp(ends.low), high=math.exp(ends.high))
        optima.append(optimum)
    return tuple(optima), noise
