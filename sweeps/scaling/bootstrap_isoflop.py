"""Bootstrap of approach 2; schemes are described in `bootstrap`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import draw_counts, known_scheme
from sweeps.scaling.curves import LOG_D, LOG_LOSS, LOG_N, vertices
from sweeps.scaling.isoflop import IsoFlopFit, Minimum, fit_curve
from sweeps.scaling.laws import saturating_laws
from sweeps.scaling.table import Array, FitError, RunTable
from sweeps.scaling.world import World, draw_world, fitted_world


@dataclass(frozen=True)
class Lines:
    """Approach 2 fitted to k replicates, [k] fp64 each; NaN where the replicate was refused.

    Attributes:
        log_k_n, a: N* = exp(log_k_n) C^a. log_k_d, b: the same for D*.
        loss_e, loss_log_k, loss_gamma: law of the loss at the optimum.
        curvature: relative loss per (ln N - ln N*)^2.
    """

    log_k_n: Array
    a: Array
    log_k_d: Array
    b: Array
    loss_e: Array
    loss_log_k: Array
    loss_gamma: Array
    curvature: Array

    def decision(self, c_flops: float) -> tuple[Array, Array, Array]:
        """N*, D* and loss at the optimum for a budget, [k] each."""
        log_c = np.log(c_flops)
        loss = self.loss_e + np.exp(self.loss_log_k - self.loss_gamma * log_c)
        return np.exp(self.log_k_n + self.a * log_c), np.exp(self.log_k_d + self.b * log_c), loss

    def loss_at(self, n_params: float, c_flops: float) -> Array:
        """Loss of a shape off the optimum, [k]."""
        n_opt, _, loss = self.decision(c_flops)
        return loss * (1 + self.curvature * (np.log(n_params) - np.log(n_opt)) ** 2)


@dataclass(frozen=True)
class IsoFlopReplicates:
    """Draws of approach 2's answers; their percentiles are its intervals.

    With a world (scheme `surface`) each draw is the fit's answer less what approach 2 missed in that world: the
    interval is of the answer without approach 2's bias. Without one, draws are the replicates themselves.

    Attributes:
        fit: the user's fit. lines: the replicates. world: surfaces the replicates were simulated on, or None.
        noise_sd: [k] sd of ln loss of a single run.
        scheme: `surface`, `noise` or `rows`. failed: replicates refused.
        budgets: [budgets] FLOPs of the fit.
    """

    fit: IsoFlopFit
    lines: Lines
    world: World | None
    noise_sd: Array
    scheme: str
    failed: int
    budgets: Array

    @property
    def a(self) -> Array:
        """[k] exponent of N*."""
        return self.lines.a if self.world is None else self.fit.a - self.lines.a + self.world.slopes(self.budgets)[0]

    @property
    def b(self) -> Array:
        """[k] exponent of D*."""
        return self.lines.b if self.world is None else self.fit.b - self.lines.b + self.world.slopes(self.budgets)[1]

    @property
    def e(self) -> Array:
        """[k] irreducible loss; NaN where the loss law has none."""
        if not self.fit.e:
            return np.full_like(self.lines.a, np.nan)
        return self.lines.loss_e if self.world is None else self.fit.e - self.lines.loss_e + self.world.e

    def decision(self, c_flops: float) -> tuple[Array, Array, Array]:
        """N*, D* and loss at the optimum for a budget, [k] each."""
        n, d, loss = self.lines.decision(c_flops)
        if self.world is None:
            return n, d, loss
        true_n, true_d, true_loss = self.world.optimum(c_flops)
        fit = self.fit
        return (
            fit.n_opt(c_flops) * true_n / n, fit.d_opt(c_flops) * true_d / d, fit.loss_opt(c_flops) * true_loss / loss,
        )  # fmt: skip

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> Array:
        """Loss of a planned run, [k]."""
        loss = self.lines.loss_at(n_params, c_flops)
        if self.world is None:
            return loss
        return self.fit.loss_at(n_params, d_tokens, c_flops) * self.world.loss(n_params, d_tokens) / loss


@dataclass(frozen=True)
class Noise:
    """sd of ln loss of one run, its degrees of freedom, and where it comes from."""

    sd: float
    dof: int
    source: str


def estimate_noise(table: RunTable, fit: IsoFlopFit) -> Noise:
    """Noise of a single run's ln loss: from repeated seeds (3 degrees of freedom or more), else parabola residuals.

    Raises:
        FitError: parabolas that pass through every point and no repeats: nothing shows the noise.
    """
    log_loss, key = np.log(table.loss), np.round(np.log(table.n), 6)
    groups: dict[tuple[float, float], list[float]] = {}
    for b, n, y in zip(table.budget, key, log_loss, strict=True):
        groups.setdefault((float(b), float(n)), []).append(float(y))
    dof = sum(len(g) - 1 for g in groups.values())
    if dof >= 3:
        squares = sum(float(np.sum((np.array(g) - np.mean(g)) ** 2)) for g in groups.values())
        return Noise(float(np.sqrt(squares / dof)), dof, "repeated seeds")
    squares, dof = 0.0, 0
    for m in fit.minima:
        if m.ok:
            rows = np.array(m.rows)
            squares += float(np.sum(np.log(m.at(table.n[rows]) / table.loss[rows]) ** 2))
            dof += len(rows) - 3
    if dof < 1:
        raise FitError("no degrees of freedom left for the noise: run more sizes a budget or repeat seeds")
    return Noise(float(np.sqrt(squares / dof)), dof, "parabola residuals")


def bootstrap_isoflop(
    table: RunTable,
    fit: IsoFlopFit,
    k: int = 1000,
    seed: int = 0,
    scheme: str = "auto",
    noise_sd: float | None = None,
) -> IsoFlopReplicates:
    """Refits approach 2 on k replicates.

    Args:
        scheme: `surface`, `noise` or `rows`; `auto` takes `surface`, or `noise` where no surface can be fitted.
        noise_sd: known sd of ln loss of one run (for example from seeds elsewhere); None estimates it.

    Raises:
        FitError: the noise cannot be estimated, or no surface fits where one was asked for.
        ValueError: unknown scheme.
    """
    known_scheme(scheme, ("auto", "surface", "noise", "rows"))
    generator = np.random.default_rng(seed)
    noise = Noise(noise_sd, 10**6, "given") if noise_sd is not None else estimate_noise(table, fit)
    sd = noise.sd * np.sqrt(noise.dof / generator.chisquare(noise.dof, k))
    if scheme == "rows":
        return _replicates(fit, _vertices_of_rows(table, fit, draw_counts(table, k, generator)), None, sd, "rows")
    fitted = fitted_world(table, seed) if scheme != "noise" else None
    if fitted is None and scheme == "surface":
        raise FitError("no surface can be fitted to these runs to simulate on; use scheme noise")
    if fitted is None:
        world, used, losses = None, "noise", _centre(table, fit)
    else:
        world, used = draw_world(table, fitted[0], sd, generator), "surface"
        losses = world.loss(table.n, table.d)
    found = _vertices_of_noise(table, fit, losses, sd, generator)
    return _replicates(fit, _add_scatter(fit, found, generator), world, sd, used)


def _curve(table: RunTable, minimum: Minimum, rows: np.ndarray, loss: Array, near: int | None) -> Array:
    """[4] fp64: ln N*, ln D*, ln loss, curvature of one replicate's budget; NaN when refused."""
    m = fit_curve(minimum.budget, rows, np.log(table.n[rows]), np.log(table.d[rows]), loss, near)
    if not m.ok or m.loss <= 0:
        return np.full(4, np.nan)
    return np.array([np.log(m.n_opt), np.log(m.d_opt), np.log(m.loss), m.coefficients[0] / m.loss])


def _vertices_of_rows(table: RunTable, fit: IsoFlopFit, counts: Array) -> Array:
    """[k, budgets, 4] of resampled rows."""
    good = [m for m in fit.minima if m.ok]
    out = np.full((len(counts), len(good), 4), np.nan)
    for j, m in enumerate(good):
        rows = np.flatnonzero(np.isclose(table.budget, m.budget, rtol=1e-9))
        for i, count in enumerate(counts):
            picked = np.repeat(rows, count[rows].astype(int))
            if len(picked):
                out[i, j] = _curve(table, m, picked, table.loss[picked], fit.near)
    return out


def _centre(table: RunTable, fit: IsoFlopFit) -> Array:
    """[runs] fp64: each parabola's own loss at the points it used, the measured loss elsewhere."""
    centre = table.loss.copy()
    for m in fit.minima:
        if m.ok:
            centre[list(m.rows)] = m.at(table.n[list(m.rows)])
    return centre


def _vertices_of_noise(
    table: RunTable, fit: IsoFlopFit, losses: Array, sd: Array, generator: np.random.Generator
) -> Array:
    """[k, budgets, 4] of the design with redrawn losses; one draw a run, shared by its rows.

    Args:
        losses: [runs] or [k, runs] fp64 without noise.
    """
    clusters = table.clusters
    draws = generator.standard_normal((len(sd), int(clusters.max()) + 1))[:, clusters]
    noisy = losses * np.exp(sd[:, None] * draws)
    log_n, log_d, budget = np.log(table.n), np.log(table.d), table.budget
    good = [m for m in fit.minima if m.ok]
    out = np.full((len(sd), len(good), 4), np.nan)
    for j, m in enumerate(good):
        rows = np.flatnonzero(np.isclose(budget, m.budget, rtol=1e-9))
        out[:, j] = vertices(log_n[rows], log_d[rows], noisy[:, rows], fit.near)
    return out


def _add_scatter(fit: IsoFlopFit, found: Array, generator: np.random.Generator) -> Array:
    """Adds the lines' residual variance that the replicates do not show to ln N*, ln D* and ln loss.

    Compared are like with like: residual variances around the fit's own lines, the user's against the replicates'
    mean. (Ragged shapes, batch rounding and a surface of another form all end up here.)
    """
    good = [m for m in fit.minima if m.ok]
    log_c = np.log([m.budget for m in good])
    log_loss = np.log([m.loss for m in good])
    out = found.copy()
    if len(good) < 3:
        return out
    measured = {LOG_N: np.log([m.n_opt for m in good]), LOG_D: np.log([m.d_opt for m in good]), LOG_LOSS: log_loss}
    for column, values in measured.items():
        total = _residual_variance(log_c, values[None])[0]
        shown = _residual_variance(log_c, found[:, :, column])
        excess = max(0.0, float(total - np.nanmean(shown))) if np.isfinite(shown).any() else 0.0
        out[:, :, column] += np.sqrt(excess) * generator.standard_normal(found.shape[:2])
    return out


def _residual_variance(log_c: Array, values: Array) -> Array:
    """[k] variance of each row of values [k, budgets] around its own line; NaN for rows with a gap."""
    x = log_c - log_c.mean()
    centred = values - values.mean(axis=1, keepdims=True)
    residuals = centred - (centred @ x / (x @ x))[:, None] * x
    return np.asarray((residuals**2).sum(axis=1) / (len(x) - 2))


def _replicates(fit: IsoFlopFit, found: Array, world: World | None, sd: Array, scheme: str) -> IsoFlopReplicates:
    budgets = np.array([m.budget for m in fit.minima if m.ok])
    lines = _lines(budgets, found, fit.loss_law.form)
    return IsoFlopReplicates(fit, lines, world, sd, scheme, int(np.isnan(lines.a).sum()), budgets)


def _lines(c: Array, found: Array, form: str) -> Lines:
    """Lines through each replicate's minima; replicates with fewer than 2 minima are NaN."""
    enough = np.isfinite(found[:, :, 0]).sum(axis=1) >= 2
    log_c = np.log(c)
    log_k_n, a = _least_squares(log_c, found[:, :, LOG_N], enough)
    log_k_d, b = _least_squares(log_c, found[:, :, LOG_D], enough)
    log_k, slope = _least_squares(log_c, found[:, :, LOG_LOSS], enough)
    loss_e = np.where(enough, 0.0, np.nan)
    if form == "saturating":
        loss_e, log_k, slope = saturating_laws(c, found[:, :, LOG_LOSS], loss_e, log_k, slope)
    with np.errstate(all="ignore"):
        counts = np.maximum(np.isfinite(found[:, :, 3]).sum(axis=1), 1)
        curvature = np.where(enough, np.nansum(found[:, :, 3], axis=1) / counts, np.nan)
    return Lines(log_k_n, a, log_k_d, b, loss_e, log_k, -slope, curvature)


def _least_squares(log_x: Array, log_y: Array, enough: np.ndarray) -> tuple[Array, Array]:
    """Row-wise straight lines that skip NaN: intercepts [k], slopes [k]."""
    use = np.isfinite(log_y)
    count = np.maximum(use.sum(axis=1), 1)
    y = np.where(use, log_y, 0.0)
    mean_x = (use * log_x).sum(axis=1) / count
    mean_y = y.sum(axis=1) / count
    dx = np.where(use, log_x - mean_x[:, None], 0.0)
    spread = np.where(enough, (dx**2).sum(axis=1), np.nan)
    slope = (dx * y).sum(axis=1) / spread
    return mean_y - slope * mean_x, slope
