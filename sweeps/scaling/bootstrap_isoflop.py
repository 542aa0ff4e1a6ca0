"""Bootstrap of approach 2, by parabolas and by splines; schemes are described in `bootstrap`."""

from __future__ import annotations

import numpy as np

from sweeps.scaling.akima import AkimaFit, spline_minima
from sweeps.scaling.bootstrap import Noise, draw_counts, draw_sd, given_noise, known_scheme, residual_noise
from sweeps.scaling.bootstrap_lines import LineReplicates, Vertices, add_scatter, line_replicates, redraw
from sweeps.scaling.curves import vertices
from sweeps.scaling.isoflop import NEAREST, IsoFlopFit, LineFit, Minimum, fit_curve, fit_isoflop
from sweeps.scaling.parametric import ParametricFit
from sweeps.scaling.table import Array, FitError, RunTable
from sweeps.scaling.world import draw_world, fitted_world

# Noise replicates behind one bootstrap replicate of a spline's minimum.
SPLINE_DRAWS = 12


def estimate_noise(table: RunTable, fit: IsoFlopFit, surface: ParametricFit | None = None) -> Noise:
    """Noise of a single run's ln loss.

    From repeated seeds (3 degrees of freedom or more); else the residuals of a surface, which are too large and not
    too small where its form does not hold; else parabola residuals, which are few.

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
    if surface is not None and len(table) > 5:
        return residual_noise(surface.residuals, 5, "surface residuals")
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
) -> LineReplicates:
    """Refits approach 2's parabolas on k replicates.

    Args:
        scheme: `surface`, `noise` or `rows`; `auto` takes `surface`, or `noise` where no surface can be fitted.
        noise_sd: known sd of ln loss of one run (for example from seeds elsewhere); None estimates it.

    Raises:
        FitError: the noise cannot be estimated, or no surface fits where one was asked for.
        ValueError: unknown scheme.
    """
    known_scheme(scheme, ("auto", "surface", "noise", "rows"))
    generator = np.random.default_rng(seed)
    if scheme == "rows":
        sd = draw_sd(_noise(table, fit, None, noise_sd), k, generator)
        return line_replicates(fit, _vertices_of_rows(table, fit, draw_counts(table, k, generator)), None, sd, "rows")
    centre = _centre(table, fit)
    return _simulate(
        table, fit, fit, lambda n, d, y: vertices(n, d, y, fit.near), centre, k, generator, seed, scheme, noise_sd
    )


def bootstrap_akima(
    table: RunTable, fit: AkimaFit, k: int = 1000, seed: int = 0, noise_sd: float | None = None
) -> LineReplicates:
    """Refits approach 2's splines on k replicates; see `bootstrap_isoflop`.

    Raises:
        FitError: the noise cannot be estimated.
    """
    parabolas = fit_isoflop(table, NEAREST, "power")
    line_sd = (fit.log_n_sd, fit.log_d_sd)
    generator = np.random.default_rng(seed)
    sd = akima_noise(table, noise_sd)
    return _simulate(
        table, fit, parabolas, lambda n, d, y: _splines(n, d, y, sd, generator), table.loss, k, generator, seed, "auto",
        noise_sd, line_sd,
    )  # fmt: skip


def akima_noise(table: RunTable, noise_sd: float | None) -> float:
    """sd of ln loss that the spline's own replicates take: as given, from seeds, or from parabolas' residuals.

    Raises:
        FitError: nothing shows the noise.
    """
    if noise_sd is not None:
        return noise_sd
    return estimate_noise(table, fit_isoflop(table, NEAREST, "power")).sd


def _simulate(
    table: RunTable,
    fit: LineFit,
    parabolas: IsoFlopFit,
    minima: Vertices,
    centre: Array,
    k: int,
    generator: np.random.Generator,
    seed: int,
    scheme: str,
    noise_sd: float | None,
    line_sd: tuple[Array, Array] | None = None,
) -> LineReplicates:
    """Replicates on drawn surfaces; around `centre` [runs] where no surface fits."""
    fitted = fitted_world(table, seed) if scheme != "noise" else None
    if fitted is None and scheme == "surface":
        raise FitError("no surface can be fitted to these runs to simulate on; use scheme noise")
    sd = draw_sd(_noise(table, parabolas, None if fitted is None else fitted[0], noise_sd), k, generator)
    if fitted is None:
        world, used, losses = None, "noise", centre
    else:
        world, used = draw_world(table, fitted[0], sd, generator), "surface"
        losses = world.loss(table.n, table.d)
    found = redraw(table, fit, losses, sd, minima, generator)
    return line_replicates(fit, add_scatter(fit, found, generator), world, sd, used, line_sd)


def _splines(log_n: Array, log_d: Array, losses: Array, sd: float, generator: np.random.Generator) -> Array:
    """[k, 4] minima of one budget's splines, each the median of a few noise replicates, as the fit's are.

    The curvature column is 0: the fit's own is used.
    """
    noise = sd * generator.standard_normal((len(losses), SPLINE_DRAWS, losses.shape[1]))
    log_loss = (np.log(losses)[:, None] + noise).reshape(-1, losses.shape[1])
    n, loss = spline_minima(log_n, log_loss)
    d, _ = spline_minima(log_d, log_loss)
    each = np.stack([n, d, loss], axis=1).reshape(len(losses), SPLINE_DRAWS, 3)
    enough = np.isfinite(each).all(axis=2).sum(axis=1) >= SPLINE_DRAWS / 2
    out = np.zeros((len(losses), 4))
    out[:, :3] = np.nan
    out[enough, :3] = np.nanmedian(each[enough], axis=1)
    return out


def _noise(table: RunTable, fit: IsoFlopFit, surface: ParametricFit | None, noise_sd: float | None) -> Noise:
    return given_noise(noise_sd) or estimate_noise(table, fit, surface)


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
