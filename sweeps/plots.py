"""Figures of a fit as files: IsoFLOP curves, and optimum and loss against compute. Matplotlib without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.plot_style import (
    GRID,
    GROUND,
    INK,
    MEASURED,
    budget_colours,
    colour_of,
    figure,
    legend,
    plain_ticks,
    save_png,
    size_ticks,
)  # fmt: skip
from sweeps.scaling.analysis import Analysis, Result
from sweeps.scaling.bootstrap import Interval
from sweeps.scaling.isoflop import Minimum
from sweeps.scaling.table import Array, RunTable

BAND_POINTS = 40
KEEP = 12  # bands that are remembered: two sets of approaches
LABELLED = 7
# Attribute of a minimum, title, exponent named in the legend.
PANELS = (
    ("n_opt", "N*, parameters", "a"),
    ("d_opt", "D*, tokens", "b"),
    ("loss", "loss at the optimum, nats per token", ""),
)


@dataclass(frozen=True)
class Marker:
    """A forecast or a measurement to show beside the fit.

    Attributes:
        c_flops, n_params, d_tokens, loss: where it is. low, high: interval of the loss; None for a measurement.
    """

    label: str
    c_flops: float
    n_params: float
    d_tokens: float
    loss: float
    low: float | None = None
    high: float | None = None


def plot_all(analysis: Analysis, folder: Path, markers: Sequence[Marker] = ()) -> list[Path]:
    """Writes isoflop.png and scaling.png; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "isoflop.png", folder / "scaling.png"]
    plot_isoflop(analysis, paths[0])
    plot_scaling(analysis, paths[1], markers)
    return paths


def plot_isoflop(analysis: Analysis, path: Path) -> None:
    """Loss against N for each budget, the fitted parabolas and their minima."""
    drawn, axes = figure(1, (8.0, 5.2))
    draw_isoflop(axes[0], analysis)
    axes[0].set_title("IsoFLOP curves: loss against size at fixed compute", fontsize=11)
    many = len(analysis.table.budgets) > LABELLED
    legend(axes[0], ncol=2 if many else 1, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_png(drawn, path)


def draw_isoflop(axis: Any, analysis: Analysis) -> None:
    """Points, parabolas and minima of every budget on one axis, without a legend."""
    table = analysis.table
    budgets = table.budgets
    for budget, colour in zip(budgets, budget_colours(len(budgets)), strict=True):
        rows = np.isclose(table.budget, budget, rtol=1e-9)
        axis.plot(table.n[rows], table.loss[rows], "o", ms=4.5, color=colour, label=f"{budget:.3g} FLOPs")
        minimum = next((m for m in analysis.minima if np.isclose(m.budget, budget, rtol=1e-9)), None)
        if minimum is not None and minimum.ok:
            _parabola(axis, table, minimum, colour)
    good = [m for m in analysis.minima if m.ok]
    if good:
        n, loss = [m.n_opt for m in good], [m.loss for m in good]
        axis.plot(n, loss, "*", ms=12, mfc=GROUND, mec=INK, mew=1.1, ls="--", lw=1, color=INK, label="minimum")
    axis.set_xscale("log")
    axis.set_xlabel(f"N, parameters ({table.n_convention})")
    axis.set_ylabel("loss, nats per token")
    size_ticks(axis.xaxis)


def _parabola(axis: Any, table: RunTable, minimum: Minimum, colour: Any) -> None:
    used = table.n[list(minimum.rows)]
    x = np.geomspace(used.min() * 0.93, used.max() * 1.07, 100)
    axis.plot(x, minimum.at(x), "-", lw=1.5, color=colour)


def plot_scaling(analysis: Analysis, path: Path, markers: Sequence[Marker] = ()) -> None:
    """N*, D* and loss at the optimum against C on log-log axes, 95% bands, forecast and measured points."""
    drawn, axes = figure(3, (14.0, 4.6))
    for panel, axis in enumerate(axes):
        draw_scaling(axis, analysis, panel, markers)
        axis.set_title(PANELS[panel][1], fontsize=11)
        legend(axis)
    drawn.suptitle("Measured on this corpus at this scale; shaded: beyond the swept budgets", fontsize=10, color=INK)
    save_png(drawn, path)


def draw_scaling(axis: Any, analysis: Analysis, panel: int, markers: Sequence[Marker] = ()) -> None:
    """One of PANELS: every approach's line and 95% band, the IsoFLOP minima, forecasts and measurements."""
    targets = [d.budget for r in analysis.results.values() for d in r.decisions] + [m.c_flops for m in markers]
    budgets = analysis.table.budgets
    c = np.geomspace(budgets.min() / 1.3, max([budgets.max(), *targets]) * 1.3, BAND_POINTS)
    for result in analysis.results.values():
        _band(axis, result, c, panel)
    good = [m for m in analysis.minima if m.ok]
    axis.plot(
        [m.budget for m in good], [getattr(m, PANELS[panel][0]) for m in good],
        "o", ms=6, mfc=GROUND, mec=INK, label="IsoFLOP minima" if good else None, zorder=4,
    )  # fmt: skip
    for marker in markers:
        _marker(axis, marker, panel)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.axvspan(budgets.max(), c.max(), color=GRID, alpha=0.45, zorder=0, lw=0)
    axis.set_xlim(c.min(), c.max())
    axis.set_xlabel(f"C, training FLOPs ({analysis.table.convention})", fontsize=9)
    if panel < 2:
        size_ticks(axis.yaxis)
    else:
        _limit_loss(axis, analysis, c, markers)
        plain_ticks(axis)


def _limit_loss(axis: Any, analysis: Analysis, c: Array, markers: Sequence[Marker]) -> None:
    """The lines, minima and markers set the scale: one wild line or band must not flatten the others."""
    shown = [r.model.loss_opt(float(x)) for r in analysis.results.values() for x in (c[0], c[-1])]
    shown += [m.loss for m in analysis.minima if m.ok]
    shown += [end for m in markers for end in (m.loss, m.low, m.high) if end is not None]
    measured = analysis.table.loss
    good = [value for value in shown if 0.3 * measured.min() < value < 2 * measured.max()]
    if good:
        axis.set_ylim(min(good) / 1.04, max(good) * 1.04)


def _band(axis: Any, result: Result, c: Array, panel: int) -> None:
    colour, model = colour_of(result.approach), result.model
    value = (model.n_opt, model.d_opt, model.loss_opt)[panel]
    exponent = PANELS[panel][2]
    label = f"{result.approach}: {exponent} = {getattr(result, exponent):.3f}" if exponent else result.approach
    axis.plot(c, [value(float(x)) for x in c], "-", lw=1.8, color=colour, label=label)
    if result.replicates is not None:
        low, high = _ends(result, c)[panel]
        axis.fill_between(c, low, high, color=colour, alpha=0.15, lw=0)


def _ends(result: Result, c: Array) -> Array:
    """[3, 2, budgets] ends of the intervals of N*, D* and of a run's loss there; a fit's figures share them."""
    key = (id(result), c.tobytes())
    if key not in _KEPT or _KEPT[key][0] is not result:  # an id may come back
        drawn = [[*result.size_intervals(x), _loss_interval(result, x)] for x in map(float, c)]
        ends = np.array([[[i.low, i.high] for i in at_c] for at_c in drawn]).transpose(1, 2, 0)
        if len(_KEPT) >= KEEP:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = result, ends
    return _KEPT[key][1]


def _loss_interval(result: Result, c_flops: float) -> Interval:
    return result.forecast_interval(result.model.n_opt(c_flops), result.model.d_opt(c_flops), c_flops)


def _marker(axis: Any, marker: Marker, panel: int) -> None:
    forecast = marker.low is not None
    colour, shape = (INK, "D") if forecast else (MEASURED, "X")
    style: dict[str, Any] = {"ms": 7, "color": colour, "mec": GROUND, "mew": 0.8, "zorder": 5, "ls": "none"}
    if panel < 2:
        if forecast:  # the run has the N and D that were planned: one point says it
            y = marker.n_params if panel == 0 else marker.d_tokens
            axis.plot([marker.c_flops], [y], shape, label="planned run", **style)
        return
    if marker.low is not None and marker.high is not None:
        error = [[marker.loss - marker.low], [marker.high - marker.loss]]
        axis.errorbar([marker.c_flops], [marker.loss], error, fmt="none", ecolor=colour, lw=1.8, capsize=6, zorder=5)
    axis.plot([marker.c_flops], [marker.loss], shape, label=marker.label, **style)


_KEPT: dict[tuple[int, bytes], tuple[Result, Array]] = {}
