"""Bootstrap of approach 2; schemes are described in `bootstrap`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import choose_scheme, draw_counts
from sweeps.scaling.isoflop import IsoFlopFit, Minimum, fit_curve
from sweeps.scaling.laws import fit_loss_law
from sweeps.scaling.table import Array, FitError, RunTable


@dataclass(frozen=True)
class IsoFlopReplicates:
    """Replicates of approach 2, [k] fp64 each; NaN where the replicate was refused.

    Attributes:
        log_k_n, a: N* = exp(log_k_n) C^a. log_k_d, b: the same for D*.
        loss_e, loss_log_k, loss_gamma: law of the loss at the optimum.
        curvature: relative loss per (ln N - ln N*)^2.
        noise_sd: standard deviation of ln loss of a single run, per replicate.
        scheme: `rows` or `noise`.
        failed: replicates refused.
    """

    log_k_n: Array
    a: Array
    log_k_d: Array
    b: Array
    loss_e: Array
    loss_log_k: Array
    loss_gamma: Array
    curvature: Array
    noise_sd: Array
    scheme: str
    failed: int

    @property
    def e(self) -> Array:
        """[k] irreducible loss; NaN where the loss law has none."""
        return self.loss_e if np.nanmax(self.loss_e, initial=0.0) > 0 else np.full_like(self.loss_e, np.nan)

    def decision(self, c_flops: float) -> tuple[Array, Array, Array]:
        """N*, D* and loss at the optimum for a budget, [k] each."""
        log_c = np.log(c_flops)
        loss = self.loss_e + np.exp(self.loss_log_k - self.loss_gamma * log_c)
        return np.exp(self.log_k_n + self.a * log_c), np.exp(self.log_k_d + self.b * log_c), loss

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> Array:
        """Loss of a planned run off the optimum, [k]."""
        n_opt, _, loss = self.decision(c_flops)
        return loss * (1 + self.curvature * (np.log(n_params) - np.log(n_opt)) ** 2)


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
        noise_sd: known sd of ln loss of one run (for example from seeds elsewhere); None estimates it.

    Raises:
        FitError: the noise cannot be estimated.
    """
    generator = np.random.default_rng(seed)
    used = choose_scheme(table, scheme)
    noise = Noise(noise_sd, 10**6, "given") if noise_sd is not None else estimate_noise(table, fit)
    sd = noise.sd * np.sqrt(noise.dof / generator.chisquare(noise.dof, k))
    if used == "rows":
        vertices = _vertices_of_rows(table, fit, draw_counts(table, k, generator))
    else:
        vertices = _vertices_of_noise(table, fit, sd, generator)
        vertices = _add_scatter(fit, vertices, generator)
    return _lines(fit, vertices, sd, used)


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


def _vertices_of_noise(table: RunTable, fit: IsoFlopFit, sd: Array, generator: np.random.Generator) -> Array:
    """[k, budgets, 4] of the design with redrawn losses; one draw a run, shared by its rows."""
    good = [m for m in fit.minima if m.ok]
    centre = table.loss.copy()
    for m in good:
        centre[list(m.rows)] = m.at(table.n[list(m.rows)])
    clusters = table.clusters
    draws = generator.standard_normal((len(sd), int(clusters.max()) + 1))[:, clusters]
    losses = centre * np.exp(sd[:, None] * draws)
    out = np.full((len(sd), len(good), 4), np.nan)
    for j, m in enumerate(good):
        rows = np.flatnonzero(np.isclose(table.budget, m.budget, rtol=1e-9))
        for i in range(len(sd)):
            out[i, j] = _curve(table, m, rows, losses[i, rows], fit.near)
    return out


def _add_scatter(fit: IsoFlopFit, vertices: Array, generator: np.random.Generator) -> Array:
    """Adds the lines' residual variance that the noise does not explain to ln N*, ln D* and ln loss."""
    good = [m for m in fit.minima if m.ok]
    c = np.array([m.budget for m in good])
    loss = np.array([m.loss for m in good])
    out = vertices.copy()
    dof = len(good) - 2
    if dof < 1:
        return out
    residual_variance = (
        fit.n_line.variance,
        fit.d_line.variance,
        float(np.sum(np.log(loss / fit.loss_law(c)) ** 2) / dof),
    )
    for column, total in enumerate(residual_variance):
        explained = float(np.nanmean(np.nanvar(vertices[:, :, column], axis=0)))
        excess = max(0.0, total - explained)
        out[:, :, column] += np.sqrt(excess) * generator.standard_normal(vertices.shape[:2])
    return out


def _lines(fit: IsoFlopFit, vertices: Array, sd: Array, scheme: str) -> IsoFlopReplicates:
    """Lines through each replicate's minima; replicates with fewer than 2 minima are NaN."""
    c = np.array([m.budget for m in fit.minima if m.ok])
    enough = np.isfinite(vertices[:, :, 0]).sum(axis=1) >= 2
    log_k_n, a = _least_squares(np.log(c), vertices[:, :, 0], enough)
    log_k_d, b = _least_squares(np.log(c), vertices[:, :, 1], enough)
    log_k, slope = _least_squares(np.log(c), vertices[:, :, 2], enough)
    loss_e = np.where(enough, 0.0, np.nan)
    if fit.loss_law.form == "saturating":
        loss_e, log_k, slope = _saturating_laws(c, vertices[:, :, 2])
    with np.errstate(all="ignore"):
        counts = np.maximum(np.isfinite(vertices[:, :, 3]).sum(axis=1), 1)
        curvature = np.where(enough, np.nansum(vertices[:, :, 3], axis=1) / counts, np.nan)
    failed = int((~enough).sum())
    return IsoFlopReplicates(log_k_n, a, log_k_d, b, loss_e, log_k, -slope, curvature, sd, scheme, failed)


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


def _saturating_laws(c: Array, log_loss: Array) -> tuple[Array, Array, Array]:
    """Irreducible loss, ln k and -gamma per replicate; a power law where the replicate shows no irreducible loss."""
    out = np.full((3, len(log_loss)), np.nan)
    for i, row in enumerate(log_loss):
        use = np.isfinite(row)
        if use.sum() < 4:
            continue
        try:
            law = fit_loss_law(c[use], np.exp(row[use]), "saturating")
        except FitError:
            law = fit_loss_law(c[use], np.exp(row[use]), "power")
        out[:, i] = law.e, law.log_k, -law.gamma
    return out[0], out[1], out[2]
