"""Figures of a fit: IsoFLOP curves, and optimum and loss against compute. Matplotlib without a display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.scaling.analysis import Analysis, Result
from sweeps.scaling.bootstrap import interval
from sweeps.scaling.isoflop import Minimum
from sweeps.scaling.table import Array, RunTable

COLOURS = {
    "isoflop": "#1f5fa8", "parametric": "#c2571a", "envelope": "#3c8d53", "isoflop_akima": "#6f9fd8",
    "parametric_linear": "#e0a04a", "kaplan": "#8a6fae",
}  # fmt: skip
MEASURED = "#1a7f37"
BAND_POINTS = 40
LABELLED = 7


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
    figure, axes = _figure(1, (8.0, 5.2))
    axis = axes[0]
    table = analysis.table
    budgets = table.budgets
    colours = _colours(len(budgets))
    for budget, colour in zip(budgets, colours, strict=True):
        rows = np.isclose(table.budget, budget, rtol=1e-9)
        axis.plot(table.n[rows], table.loss[rows], "o", ms=5, color=colour, label=f"{budget:.3g} FLOPs")
        minimum = next((m for m in analysis.minima if np.isclose(m.budget, budget, rtol=1e-9)), None)
        if minimum is not None and minimum.ok:
            _parabola(axis, table, minimum, colour)
    good = [m for m in analysis.minima if m.ok]
    if good:
        n, loss = [m.n_opt for m in good], [m.loss for m in good]
        axis.plot(n, loss, "*", ms=13, mfc="none", mec="black", mew=1.2, ls="--", color="0.45", label="minimum")
    axis.set_xscale("log")
    axis.set_xlabel(f"N, parameters ({table.n_convention})")
    axis.set_ylabel("loss, nats per token")
    axis.set_title("IsoFLOP curves: loss against size at fixed compute", fontsize=11)
    many = len(budgets) > LABELLED
    axis.legend(fontsize=8, frameon=False, ncol=2 if many else 1, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _size_ticks(axis.xaxis)
    _save(figure, path)


def _parabola(axis: Any, table: RunTable, minimum: Minimum, colour: Any) -> None:
    used = table.n[list(minimum.rows)]
    x = np.geomspace(used.min() * 0.93, used.max() * 1.07, 100)
    axis.plot(x, minimum.at(x), "-", lw=1.5, color=colour)


def plot_scaling(analysis: Analysis, path: Path, markers: Sequence[Marker] = ()) -> None:
    """N*, D* and loss at the optimum against C on log-log axes, 95% bands, forecast and measured points."""
    figure, axes = _figure(3, (14.0, 4.6))
    targets = [d.budget for r in analysis.results.values() for d in r.decisions] + [m.c_flops for m in markers]
    budgets = analysis.table.budgets
    c = np.geomspace(budgets.min() / 1.3, max([budgets.max(), *targets]) * 1.3, BAND_POINTS)
    for result in analysis.results.values():
        _bands(axes, result, c)
    good = [m for m in analysis.minima if m.ok]
    for axis, values in zip(axes, ("n_opt", "d_opt", "loss"), strict=True):
        axis.plot(
            [m.budget for m in good], [getattr(m, values) for m in good],
            "o", ms=6, mfc="white", mec="black", label="IsoFLOP minima", zorder=4,
        )  # fmt: skip
    for marker in markers:
        _marker(axes, marker)
    names = ("N*, parameters", "D*, tokens", "loss at the optimum, nats per token")
    for axis, name in zip(axes, names, strict=True):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.axvspan(budgets.max(), c.max(), color="0.94", zorder=0)
        axis.set_xlim(c.min(), c.max())
        axis.set_xlabel(f"C, training FLOPs ({analysis.table.convention})", fontsize=9)
        axis.set_title(name, fontsize=11)
        axis.legend(fontsize=8, frameon=False)
    for axis in axes[:2]:
        _size_ticks(axis.yaxis)
    _plain_ticks(axes[2])
    figure.suptitle("Measured on this corpus at this scale; shaded: beyond the swept budgets", fontsize=10, color="0.3")
    _save(figure, path)


def _bands(axes: Sequence[Any], result: Result, c: Array) -> None:
    colour = COLOURS[result.approach]
    model = result.model
    lines = [[model.n_opt(x) for x in c], [model.d_opt(x) for x in c], [model.loss_opt(x) for x in c]]
    labels = [f"{result.approach}: a = {result.a:.3f}", f"{result.approach}: b = {result.b:.3f}", result.approach]
    for axis, line, label in zip(axes, lines, labels, strict=True):
        axis.plot(c, line, "-", lw=1.8, color=colour, label=label)
    if result.replicates is None:
        return
    replicates = result.replicates
    ends = np.array([[[i.low, i.high] for i in map(interval, replicates.decision(float(x)))] for x in c])
    for j, axis in enumerate(axes):
        axis.fill_between(c, ends[:, j, 0], ends[:, j, 1], color=colour, alpha=0.15, lw=0)


def _marker(axes: Sequence[Any], marker: Marker) -> None:
    forecast = marker.low is not None
    colour, shape = ("black", "D") if forecast else (MEASURED, "X")
    style: dict[str, Any] = {"ms": 7, "color": colour, "mec": "white", "mew": 0.8, "zorder": 5, "ls": "none"}
    if forecast:  # the run has the N and D that were planned: one point says it
        axes[0].plot([marker.c_flops], [marker.n_params], shape, label="planned run", **style)
        axes[1].plot([marker.c_flops], [marker.d_tokens], shape, label="planned run", **style)
    if marker.low is not None and marker.high is not None:
        error = [[marker.loss - marker.low], [marker.high - marker.loss]]
        axes[2].errorbar([marker.c_flops], [marker.loss], error, fmt="none", ecolor=colour, lw=1.8, capsize=6, zorder=5)
    axes[2].plot([marker.c_flops], [marker.loss], shape, label=marker.label, **style)


def _figure(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    for axis in axes:
        axis.grid(True, which="major", color="0.9", lw=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)


def _colours(count: int) -> list[Any]:
    import matplotlib

    ramp = matplotlib.colormaps["viridis"]
    return [ramp(0.05 + 0.8 * i / max(count - 1, 1)) for i in range(count)]


def _size_ticks(axis: Any) -> None:
    """Ticks at 1, 2, 5 of each decade, written as 100k, 2M: a sweep often spans one decade only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    from sweeps.fit_report import quantity

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain_ticks(axis: Any) -> None:
    """A loss axis spans less than a decade: a few plain numbers, not powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

    low, high = axis.get_ylim()
    ticks = [t for t in MaxNLocator(7).tick_values(low, high) if low <= t <= high]
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
