"""Approach 2 with splines in place of parabolas: the protocol of Porian et al. 2024 (arXiv 2406.19146, section 3).

Per budget, an Akima spline of ln loss over ln N through every point is read on a geometric grid of (points - 1) * 25
sizes; the lowest grid point is the minimum, and a minimum at an edge counts as none. That is repeated on losses with
noise added: N* is the median of the replicates, and its weight in the log-log line 1 / sd^2 of their ln N*. The same
for D*. A spline follows each point, so it has no parabola's bias and more noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.interpolate import Akima1DInterpolator

from sweeps.scaling.isoflop import MIN_POINTS, NEAREST, NOTHING, LineFit, Minimum, fit_curve, refusals
from sweeps.scaling.laws import PowerLine, fit_loss_law
from sweeps.scaling.table import Array, FitError, RunTable

GRID_PER_STEP = 25
REPLICATES = 1000
# sd of ln N* is at least this share of the step between neighbouring sizes.
MIN_SD_STEPS = 0.33


@dataclass(frozen=True)
class AkimaFit(LineFit):
    """Approach 2 by splines, with weighted lines; the curvature is that of parabolas.

    Attributes:
        log_n_sd, log_d_sd: [accepted minima] fp64, sd of ln N* and ln D* the weights stand on.
        draws: [accepted minima] tuple of [valid, 2] fp64, ln N* and ln D* of each budget's noise replicates.
    """

    log_n_sd: Array
    log_d_sd: Array
    draws: tuple[tuple[Array, Array], ...]

    def exponent_draws(self) -> Array:
        """[replicates] fp64: a of the line through the i-th valid replicate of every budget, the published interval."""
        log_c = np.log([m.budget for m in self.minima if m.ok])
        count = min(len(n) for n, _ in self.draws)
        return weighted_lines(log_c, np.stack([n[:count] for n, _ in self.draws], axis=1), self.log_n_sd)[1]


def fit_akima(
    table: RunTable, noise_sd: float | Array, k: int = REPLICATES, seed: int = 0, loss_form: str = "auto"
) -> AkimaFit:
    """Fits every budget's spline and the weighted lines.

    Args:
        noise_sd: of ln loss of one run; one for all, or [runs] fp64.
        k: noise replicates a budget.

    Raises:
        FitError: fewer than two budgets have a minimum inside their grid; the message gives each refusal.
    """
    generator = np.random.default_rng(seed)
    sd = np.broadcast_to(np.asarray(noise_sd, dtype=np.float64), len(table))
    found = [_fit_budget(table, float(b), sd, k, generator) for b in table.budgets]
    minima = tuple(minimum for minimum, _, _, _ in found)
    good = [m for m in minima if m.ok]
    if len(good) < 2:
        why = refusals(minima) or "no other budgets"
        raise FitError(f"isoflop_akima needs minima at 2 budgets or more, {len(good)} found ({why})")
    c = np.array([m.budget for m in good])
    n_sd = np.array([s[0] for m, s, _, _ in found if m.ok])
    d_sd = np.array([s[1] for m, s, _, _ in found if m.ok])
    return AkimaFit(
        minima=minima,
        n_line=_weighted_line(c, np.array([m.n_opt for m in good]), n_sd),
        d_line=_weighted_line(c, np.array([m.d_opt for m in good]), d_sd),
        log_n_sd=n_sd,
        log_d_sd=d_sd,
        loss_law=fit_loss_law(c, np.array([m.loss for m in good]), loss_form),
        curvature=_mean_curvature([curve for m, _, _, curve in found if m.ok]),
        draws=tuple(draws for m, _, draws, _ in found if m.ok),
    )


def _fit_budget(
    table: RunTable, budget: float, sd: Array, k: int, generator: np.random.Generator
) -> tuple[Minimum, tuple[float, float], tuple[Array, Array], Minimum]:
    """One budget: its minimum, sd of ln N* and ln D*, their replicates, and its parabola (for the curvature)."""
    rows = np.flatnonzero(np.isclose(table.budget, budget, rtol=1e-9))
    # By size, so that the draws do not depend on the order of the table's rows.
    rows = rows[np.lexsort((table.loss[rows], table.n[rows]))]
    log_n, log_d = np.log(table.n[rows]), np.log(table.d[rows])
    parabola = fit_curve(budget, rows, log_n, log_d, table.loss[rows], NEAREST)
    _, first, run = np.unique(table.clusters[rows], return_index=True, return_inverse=True)
    column = np.argsort(np.argsort(first))[run]
    noise = generator.standard_normal((k, len(first)))[:, column] * sd[rows]
    log_loss = np.log(table.loss[rows]) + noise
    n, loss, n_reason = _replicated_minimum(log_n, log_loss, "N")
    d, _, d_reason = _replicated_minimum(log_d, log_loss, "D")
    reason = n_reason or d_reason
    used = tuple(int(r) for r in rows)
    if reason:
        nothing = (np.empty(0), np.empty(0))
        minimum = Minimum(budget, np.nan, np.nan, np.nan, NOTHING, float(log_n.mean()), used, reason)
        return minimum, (np.nan, np.nan), nothing, parabola
    n_star, d_star = float(np.exp(np.median(n))), float(np.exp(np.median(d)))
    lowest = float(np.exp(np.median(loss)))
    minimum = Minimum(budget, n_star, d_star, lowest, NOTHING, float(log_n.mean()), used)
    return minimum, (_sd(n, log_n, k), _sd(d, log_d, k)), (n, d), parabola


def spline_minima(x: Array, log_loss: Array) -> tuple[Array, Array]:
    """Minima of Akima splines, for many replicates at once.

    Args:
        x: [points] fp64, ln N or ln D; repeats are averaged. log_loss: [k, points] fp64.

    Returns:
        x of the minimum and ln loss there, [k] each; NaN where it is at an edge, or with fewer than 3 sizes.
    """
    sizes, inverse = np.unique(np.round(x, 9), return_inverse=True)
    if len(sizes) < MIN_POINTS:
        return np.full(len(log_loss), np.nan), np.full(len(log_loss), np.nan)
    member = (inverse == np.arange(len(sizes))[:, None]).astype(np.float64)
    y = log_loss @ (member / member.sum(axis=1, keepdims=True)).T
    grid = np.linspace(sizes[0], sizes[-1], (len(sizes) - 1) * GRID_PER_STEP)
    curves = Akima1DInterpolator(sizes, y.T)(grid)
    best = np.argmin(curves, axis=0)
    inside = (best > 0) & (best < len(grid) - 1)
    at = np.arange(len(log_loss))
    return np.where(inside, grid[best], np.nan), np.where(inside, curves[best, at], np.nan)


def _replicated_minimum(x: Array, log_loss: Array, name: str) -> tuple[Array, Array, str]:
    """Valid replicates' x and ln loss at the minimum, and the reason to refuse the budget."""
    sizes = len(np.unique(np.round(x, 9)))
    if sizes < MIN_POINTS:
        return np.empty(0), np.empty(0), f"{sizes} sizes, a spline's minimum needs {MIN_POINTS}"
    found, loss = spline_minima(x, log_loss)
    valid = np.isfinite(found)
    if valid.sum() < len(found) / 2:
        low, high = np.exp(x.min()), np.exp(x.max())
        return found, loss, f"the minimum in {name} is at an edge of the grid ({low:.3g} to {high:.3g})"
    return found[valid], loss[valid], ""


def _sd(values: Array, x: Array, k: int) -> float:
    """sd of valid replicates, not below a third of the step between sizes, larger when some were refused."""
    sizes = len(np.unique(np.round(x, 9)))
    step = (x.max() - x.min()) / ((sizes - 1) * GRID_PER_STEP - 1) * GRID_PER_STEP
    return float(max(values.std(), MIN_SD_STEPS * step) * k / len(values))


def _mean_curvature(parabolas: list[Minimum]) -> float:
    values = [m.coefficients[0] / m.loss for m in parabolas if m.ok]
    return float(np.mean(values)) if values else 0.0


def weighted_lines(log_x: Array, log_y: Array, sd: Array) -> tuple[Array, Array]:
    """Lines through rows of log_y [k, points] with weights 1 / sd^2; rows with a gap use the rest: [k], [k]."""
    use = np.isfinite(log_y)
    weight = use / sd**2
    total = weight.sum(axis=1)
    with np.errstate(all="ignore"):
        y = np.where(use, log_y, 0.0)
        x_mean = (weight @ log_x) / total
        y_mean = (weight * y).sum(axis=1) / total
        dx = log_x - x_mean[:, None]
        slope = (weight * dx * y).sum(axis=1) / (weight * dx**2).sum(axis=1)
    slope = np.where(use.sum(axis=1) >= 2, slope, np.nan)
    return y_mean - slope * x_mean, slope


def _weighted_line(x: Array, y: Array, sd: Array) -> PowerLine:
    log_x, log_y = np.log(x), np.log(y)
    intercept, slope = weighted_lines(log_x, log_y[None], sd)
    residuals = log_y - intercept[0] - slope[0] * log_x
    dof = len(x) - 2
    variance = float(residuals @ residuals / dof) if dof > 0 else float("nan")
    return PowerLine(float(intercept[0]), float(slope[0]), log_x, residuals, variance)
