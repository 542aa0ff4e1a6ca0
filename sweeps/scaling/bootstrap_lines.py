"""Replicates of approaches that put lines through the minima of IsoFLOP curves (parabolas, splines)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.akima import weighted_lines
from sweeps.scaling.bootstrap import draw_noise
from sweeps.scaling.curves import CURVATURE, LOG_D, LOG_LOSS, LOG_N
from sweeps.scaling.isoflop import LineFit
from sweeps.scaling.laws import saturating_laws
from sweeps.scaling.table import Array, RunTable
from sweeps.scaling.world import World

# (log_n [points], log_d [points], losses [k, points]) of one budget -> [k, 4]: see `curves`.
Vertices = Callable[[Array, Array, Array], Array]


@dataclass(frozen=True)
class Lines:
    """Lines fitted to k replicates, [k] fp64 each; NaN where the replicate was refused.

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
class LineReplicates:
    """Draws of a line fit's answers; their percentiles are its intervals.

    With a world (scheme `surface`) each draw is the fit's answer less what the same fit missed in that world: the
    interval is of the answer without its bias. Without one, draws are the replicates themselves.

    Attributes:
        fit: the user's fit. lines: the replicates. world: surfaces the replicates were simulated on, or None.
        noise_sd: [k] sd of ln loss of a single run.
        scheme: `surface`, `noise` or `rows`. failed: replicates refused.
        budgets: [budgets] FLOPs of the fit.
    """

    fit: LineFit
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


def redraw(
    table: RunTable, fit: LineFit, losses: Array, sd: Array, vertices: Vertices, generator: np.random.Generator
) -> Array:
    """[k, budgets, 4] minima of the design with redrawn losses; one draw a run, shared by its rows.

    Args:
        losses: [runs] or [k, runs] fp64 without noise. sd: [k] fp64, of ln loss.
    """
    noisy = losses * np.exp(sd[:, None] * draw_noise(table, len(sd), generator))
    log_n, log_d, budget = np.log(table.n), np.log(table.d), table.budget
    good = [m for m in fit.minima if m.ok]
    out = np.full((len(sd), len(good), 4), np.nan)
    for j, m in enumerate(good):
        rows = np.flatnonzero(np.isclose(budget, m.budget, rtol=1e-9))
        out[:, j] = vertices(log_n[rows], log_d[rows], noisy[:, rows])
    return out


def add_scatter(fit: LineFit, found: Array, generator: np.random.Generator) -> Array:
    """Adds the lines' residual variance that the replicates do not show to ln N*, ln D* and ln loss.

    Compared are like with like, residual variances around straight lines: the user's counts as unexplained when it
    is above the replicates' 95th percentile. Ragged shapes, batch rounding and a surface of another form end up here.
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
        if not np.isfinite(shown).any() or total <= np.nanpercentile(shown, 95):
            continue  # as much scatter as the replicates show by themselves
        excess = max(float(total - np.nanmean(shown)), 0.0)
        out[:, :, column] += np.sqrt(excess) * generator.standard_normal(found.shape[:2])
    return out


def _residual_variance(log_c: Array, values: Array) -> Array:
    """[k] variance of each row of values [k, budgets] around its own line; NaN for rows with a gap."""
    x = log_c - log_c.mean()
    centred = values - values.mean(axis=1, keepdims=True)
    residuals = centred - (centred @ x / (x @ x))[:, None] * x
    return np.asarray((residuals**2).sum(axis=1) / (len(x) - 2))


def line_replicates(
    fit: LineFit,
    found: Array,
    world: World | None,
    sd: Array,
    scheme: str,
    line_sd: tuple[Array, Array] | None = None,
) -> LineReplicates:
    """Lines through replicates' minima [k, budgets, 4]; `line_sd`: of ln N* and ln D*, for weights."""
    budgets = np.array([m.budget for m in fit.minima if m.ok])
    lines = fit_lines(budgets, found, fit.loss_law.form, line_sd)
    return LineReplicates(fit, lines, world, sd, scheme, int(np.isnan(lines.a).sum()), budgets)


def fit_lines(c: Array, found: Array, form: str, line_sd: tuple[Array, Array] | None = None) -> Lines:
    """Lines through each replicate's minima [k, budgets, 4]; replicates with fewer than 2 minima are NaN."""
    log_c, same = np.log(c), np.ones(len(c))
    n_sd, d_sd = line_sd or (same, same)
    log_k_n, a = weighted_lines(log_c, found[:, :, LOG_N], n_sd)
    log_k_d, b = weighted_lines(log_c, found[:, :, LOG_D], d_sd)
    log_k, slope = weighted_lines(log_c, found[:, :, LOG_LOSS], same)
    loss_e = np.where(np.isfinite(a), 0.0, np.nan)
    if form == "saturating":
        loss_e, log_k, slope = saturating_laws(c, found[:, :, LOG_LOSS], loss_e, log_k, slope)
    with np.errstate(all="ignore"):
        counts = np.maximum(np.isfinite(found[:, :, CURVATURE]).sum(axis=1), 1)
        curvature = np.where(np.isfinite(a), np.nansum(found[:, :, CURVATURE], axis=1) / counts, np.nan)
    return Lines(log_k_n, a, log_k_d, b, loss_e, log_k, -slope, curvature)
