"""Figures of the report, one panel each so that they read on a phone: inline SVG in the page's own colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sweeps.plot_style import GROUND, INK, colour_of, figure, legend, plain_ticks, ramp, shape_of, size_ticks, svg
from sweeps.plots import PANELS, Marker, draw_isoflop, draw_scaling
from sweeps.scaling.analysis import Analysis, Result
from sweeps.scaling.surfaces import Surface
from sweeps.scaling.table import Array, RunTable

MOST_NAMED = 12  # budgets in a legend; more are a colour bar
WILD = 20.0  # an approach whose residuals are this many times the smallest does not set the scale
SAME_SIZE = 0.02  # runs whose ln N differs by less are one size


def isoflop(analysis: Analysis) -> str:
    """IsoFLOP curves."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    drawn, (axis,) = figure()
    draw_isoflop(axis, analysis)
    budgets = analysis.table.budgets
    if len(budgets) <= MOST_NAMED:
        legend(axis, ncol=3, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    else:
        _colour_bar(drawn, axis, ScalarMappable(LogNorm(budgets.min(), budgets.max()), ramp()), "budget, FLOPs")
    return svg(drawn, "IsoFLOP curves: loss against size at fixed compute")


def compute(analysis: Analysis) -> str:
    """Loss against compute for every size, log-log, with the envelope: the preferred fit's loss at the optimum."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    table = analysis.table
    drawn, (axis,) = figure()
    norm = LogNorm(table.n.min() / 1.5, table.n.max() * 1.5)
    for rows in _sizes(table):
        order = rows[np.argsort(table.c[rows])]
        colour = ramp()(norm(table.n[rows[0]]))
        axis.plot(table.c[order], table.loss[order], "-", lw=0.9, alpha=0.8, color=colour)
        axis.plot(table.c[order], table.loss[order], "o", ms=3.6, color=colour)
    if analysis.results:
        c = np.geomspace(table.c.min() / 1.15, table.c.max() * 1.15, 60)
        best = analysis.best
        line = [best.model.loss_opt(float(x)) for x in c]
        axis.plot(c, line, "--", lw=1.8, color=INK, label=f"optimum ({best.approach})")
    axis.set_xscale("log")
    axis.set_yscale("log")
    plain_ticks(axis)
    axis.set_xlabel(f"C, training FLOPs ({table.convention})")
    axis.set_ylabel("loss, nats per token")
    size_ticks(_colour_bar(drawn, axis, ScalarMappable(norm, ramp()), "N, parameters").yaxis)
    legend(axis)
    return svg(drawn, "Loss against compute for every size, with the envelope")


def _colour_bar(drawn: Any, axis: Any, colours: Any, label: str) -> Any:
    """A slim bar in the figure's ink; returns its axis."""
    bar = drawn.colorbar(colours, ax=axis, pad=0.01, aspect=30)
    bar.ax.tick_params(colors=INK, which="both", labelsize=8)
    bar.set_label(label, color=INK, fontsize=8)
    bar.outline.set_visible(False)
    return bar.ax


def _sizes(table: RunTable) -> list[np.ndarray]:
    """Indices of the runs of each size, ascending in N."""
    order = np.argsort(table.n)
    return np.split(order, np.flatnonzero(np.diff(np.log(table.n[order])) > SAME_SIZE) + 1)


def scaling(analysis: Analysis, panel: int, markers: Sequence[Marker] = ()) -> str:
    """N*, D* or the loss at the optimum against C with bands: one of `plots.PANELS`."""
    drawn, (axis,) = figure()
    draw_scaling(axis, analysis, panel, markers)
    axis.set_ylabel(PANELS[panel][1])
    legend(axis, fontsize=7.5)
    return svg(drawn, f"{PANELS[panel][1]} against compute")


def surface(analysis: Analysis) -> str | None:
    """The parametric surface as contours of loss over N and D, each run coloured by its residual; None without one."""
    result = surface_result(analysis)
    if result is None:
        return None
    table = analysis.table
    n = np.geomspace(table.n.min() / 1.6, table.n.max() * 1.6, 60)
    d = np.geomspace(table.d.min() / 1.6, table.d.max() * 1.6, 60)
    loss = np.array([[result.model.loss_at(x, y, 6 * x * y) for x in n] for y in d])
    off = 100 * residuals(result, table)
    drawn, (axis,) = figure()
    levels = np.geomspace(max(loss.min(), table.loss.min() * 0.97), table.loss.max() * 1.03, 11)
    lines = axis.contour(n, d, loss, levels=levels, colors=[INK], linewidths=0.7, alpha=0.45)
    axis.clabel(lines, fmt=lambda level: f"{level:.3g}", fontsize=7, colors=[INK])
    limit = max(float(np.percentile(np.abs(off), 95)), 1e-3)
    dots = axis.scatter(table.n, table.d, c=off, cmap="coolwarm", vmin=-limit, vmax=limit, s=22, lw=0.5, ec=INK)
    c = np.geomspace(table.c.min(), table.c.max(), 30)
    best_n = [result.model.n_opt(float(x)) for x in c]
    best_d = [result.model.d_opt(float(x)) for x in c]
    axis.plot(best_n, best_d, "-", lw=2, color=colour_of(result.approach), label="optimum")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(n[0], n[-1])
    axis.set_ylim(d[0], d[-1])
    size_ticks(axis.xaxis)
    size_ticks(axis.yaxis)
    axis.set_xlabel(f"N, parameters ({table.n_convention})")
    axis.set_ylabel("D, tokens")
    _colour_bar(drawn, axis, dots, "measured over fitted, %")
    legend(axis)
    return svg(drawn, "Parametric surface: loss over size and tokens, with residuals")


def surface_result(analysis: Analysis) -> Result | None:
    """The surface fit to show: the one with the smaller holdout error."""
    found = [r for r in analysis.results.values() if isinstance(r.model, Surface)]
    return min(found, key=lambda r: np.nan_to_num(r.holdout.relative_error, nan=np.inf), default=None)


def residuals(result: Result, table: RunTable) -> Array:
    """[runs] ln of measured loss over fitted loss."""
    points = zip(table.n, table.d, table.c, strict=True)
    fitted = np.array([result.model.loss_at(float(n), float(d), float(c)) for n, d, c in points])
    return np.log(table.loss / fitted)


def misfit(analysis: Analysis) -> str | None:
    """Residuals of every approach against how far a run is from its budget's optimum; None without results."""
    if not analysis.results:
        return None
    table = analysis.table
    drawn, (axis,) = figure()
    every = []
    for i, result in enumerate(analysis.results.values()):
        centre = np.array([result.model.n_opt(float(c)) for c in table.c])
        off = 100 * residuals(result, table)
        every.append(off)
        axis.plot(
            table.n / centre, off, shape_of(i), ms=3.5, alpha=0.75, color=colour_of(result.approach),
            mec=GROUND, mew=0.3, label=f"{result.approach}: rms {np.sqrt(np.nanmean(off**2)):.2f}%",
        )  # fmt: skip
    axis.axhline(0, color=INK, lw=1)
    reach = [float(np.nanpercentile(np.abs(off), 98)) for off in every]
    limit = 1.15 * max(size for size in reach if size <= WILD * min(reach))
    axis.set_ylim(-limit, limit)
    axis.set_xscale("log")
    axis.set_xlabel("N / N*, at the run's own compute")
    axis.set_ylabel("measured over fitted loss, %")
    size_ticks(axis.xaxis)
    legend(axis, fontsize=7, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    return svg(drawn, "Residuals of every approach against the distance from the optimum")


def exponents(rows: Sequence[tuple[str, str, float, float, float]]) -> str | None:
    """Exponent of N* with its interval, a line a row.

    Args:
        rows: (label, approach, value, low, high); NaN ends where there is no interval.
    """
    if not rows:
        return None
    drawn, (axis,) = figure(size=(5.4, 1.0 + 0.32 * len(rows)))
    for y, (_, approach, value, low, high) in enumerate(reversed(rows)):
        colour = colour_of(approach)
        if np.isfinite(low):
            axis.plot([low, high], [y, y], "-", lw=2.4, color=colour, solid_capstyle="butt")
        axis.plot([value], [y], "o", ms=6.5, color=colour, mec=GROUND)
    axis.axvline(0.5, color=INK, lw=0.9, ls=":")
    axis.set_yticks(range(len(rows)), [row[0] for row in reversed(rows)], fontsize=8)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.grid(False, axis="y")
    axis.set_xlabel("a: N* grows as C to the power a (dotted: one half)")
    return svg(drawn, "Exponent of the optimal size by approach")
