"""Approach 1 of Hoffmann et al. 2022 (arXiv 2203.15556, section 3.1): the lower envelope of loss against compute.

At each C the run with the lowest loss gives N*, D* and the loss; lines in logs go through them. Rows of training curves
(several rows a run, at many C) are put into bins of an eighth of a decade. A table with one loss a run has only its
budgets: one point each, with N* no finer than the sizes that ran.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import draw_counts, draw_sd, given_noise
from sweeps.scaling.bootstrap_isoflop import estimate_noise
from sweeps.scaling.bootstrap_lines import LineReplicates, add_scatter, line_replicates, redraw
from sweeps.scaling.isoflop import MIN_POINTS, NOTHING, IsoFlopFit, Minimum, fit_isoflop, refusals
from sweeps.scaling.laws import fit_loss_law, fit_power_line
from sweeps.scaling.table import Array, FitError, RunTable
from sweeps.scaling.world import draw_world, fitted_world

MIN_BINS = 3
BINS_PER_DECADE = 8


@dataclass(frozen=True)
class EnvelopeFit(IsoFlopFit):
    """Lines through the envelope's points. curves: whether the table holds training curves (several rows a run)."""

    curves: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """What limits the fit, in words."""
        flags = [f"{m.budget:.3g} FLOPs refused: {m.reason}" for m in self.minima if not m.ok]
        if not self.curves:
            flags.append("one loss a run: one envelope point a budget, N* no finer than the sizes that ran")
        return tuple(flags)


def fit_envelope(table: RunTable, loss_form: str = "auto") -> EnvelopeFit:
    """Fits approach 1.

    Raises:
        FitError: fewer than three bins have a lowest run inside their sizes; the message gives each refusal.
    """
    curves = has_curves(table)
    bins = _bins(table, curves)
    minima = tuple(_lowest(table, np.flatnonzero(bins == b), curves) for b in np.unique(bins))
    good = [m for m in minima if m.ok]
    if len(good) < MIN_BINS:
        why = refusals(minima) or "no other FLOPs"
        raise FitError(f"envelope needs {MIN_BINS} points or more, {len(good)} found ({why})")
    c = np.array([m.budget for m in good])
    return EnvelopeFit(
        minima=minima,
        n_line=fit_power_line(c, np.array([m.n_opt for m in good])),
        d_line=fit_power_line(c, np.array([m.d_opt for m in good])),
        loss_law=fit_loss_law(c, np.array([m.loss for m in good]), loss_form),
        curvature=0.0,
        near=None,
        curves=curves,
    )


def has_curves(table: RunTable) -> bool:
    """Whether the table holds training curves: most runs have several rows, at different FLOPs."""
    clusters = table.clusters
    return len(table) > 0 and len(table) >= 2 * (int(clusters.max()) + 1)


def _bins(table: RunTable, curves: bool) -> Array:
    """[rows] fp64: the bin each row belongs to, budgets or eighths of a decade."""
    if not curves:
        return table.budget
    return np.asarray(np.floor(np.log10(table.c) * BINS_PER_DECADE))


def _lowest(table: RunTable, rows: np.ndarray, curves: bool) -> Minimum:
    """The run with the lowest loss of one bin; refused where its size is the smallest or largest of the bin."""
    n, loss = table.n[rows], table.loss[rows]
    sizes = np.unique(np.round(np.log(n), 9))
    best = int(rows[np.argmin(loss)])
    # A bin of a curve's points spans a range of C: the point is where its run was. A budget is where all runs were.
    c = float(table.c[best] if curves else table.budget[best])
    used = tuple(int(r) for r in rows)
    reason = ""
    if len(sizes) < MIN_POINTS:
        reason = f"{len(sizes)} sizes, a lowest inside the grid needs {MIN_POINTS}"
    elif table.n[best] <= n.min() * (1 + 1e-9):
        reason = f"the lowest loss is at the smallest N that ran ({n.min():.3g}); add smaller N"
    elif table.n[best] >= n.max() * (1 - 1e-9):
        reason = f"the lowest loss is at the largest N that ran ({n.max():.3g}); add larger N"
    if reason:
        return Minimum(c, np.nan, np.nan, np.nan, NOTHING, 0.0, used, reason)
    return Minimum(c, float(table.n[best]), float(table.d[best]), float(table.loss[best]), NOTHING, 0.0, used)


def bootstrap_envelope(
    table: RunTable, fit: EnvelopeFit, k: int = 1000, seed: int = 0, noise_sd: float | None = None
) -> LineReplicates:
    """Refits approach 1 on k replicates: on simulated losses for one loss a run, on resampled runs for curves.

    Raises:
        FitError: nothing shows the noise, or no surface fits a table with one loss a run.
    """
    generator = np.random.default_rng(seed)
    if fit.curves:
        found = _resampled(table, fit, draw_counts(table, k, generator))
        return line_replicates(fit, found, None, np.full(k, noise_sd or 0.0), "rows")
    fitted = fitted_world(table, seed)
    if fitted is None:
        raise FitError("no surface can be fitted to these runs to simulate on")
    noise = given_noise(noise_sd) or estimate_noise(table, fit_isoflop(table), fitted[0])
    sd = draw_sd(noise, k, generator)
    world = draw_world(table, fitted[0], sd, generator)
    found = redraw(table, fit, world.loss(table.n, table.d), sd, _argmin, generator)
    return line_replicates(fit, add_scatter(fit, found, generator), world, sd, "surface")


def _argmin(log_n: Array, log_d: Array, losses: Array) -> Array:
    """[k, 4] lowest run of one budget; NaN at the smallest or largest size. The curvature column is 0."""
    best = losses.argmin(axis=1)
    inside = (log_n[best] > log_n.min() + 1e-9) & (log_n[best] < log_n.max() - 1e-9)
    lowest = np.log(losses[np.arange(len(losses)), best])
    found = np.stack([log_n[best], log_d[best], lowest, np.zeros(len(losses))], axis=1)
    return np.where(inside[:, None], found, np.nan)


def _resampled(table: RunTable, fit: EnvelopeFit, counts: Array) -> Array:
    """[k, bins, 4] of resampled runs: each bin's lowest among the runs that were drawn, at the bin's own C.

    ln N*, ln D* and ln loss move along the fit's lines from the drawn row's C to that of the bin's point.
    """
    good = [m for m in fit.minima if m.ok]
    out = np.full((len(counts), len(good), 4), np.nan)
    log_n, log_d, log_c, log_loss = np.log(table.n), np.log(table.d), np.log(table.c), np.log(table.loss)
    for j, m in enumerate(good):
        rows = np.array(m.rows)
        drawn = counts[:, rows] > 0
        best = rows[np.where(drawn, table.loss[rows], np.inf).argmin(axis=1)]
        shift = np.log(m.budget) - log_c[best]
        slope = -fit.loss_law.gamma * (1 - fit.loss_law.e / m.loss)
        out[:, j, 0] = log_n[best] + fit.a * shift
        out[:, j, 1] = log_d[best] + fit.b * shift
        out[:, j, 2] = log_loss[best] + slope * shift
        out[:, j, 3] = 0.0
        edge_low = np.where(drawn, log_n[rows], np.inf).min(axis=1)
        edge_high = np.where(drawn, log_n[rows], -np.inf).max(axis=1)
        inside = (log_n[best] > edge_low + 1e-9) & (log_n[best] < edge_high - 1e-9)
        out[~inside, j] = np.nan
    return out
