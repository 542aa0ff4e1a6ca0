"""Figure of a backtest: what each sweep measured, and what its smaller budgets had forecast."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.plot_style import GRID, GROUND, INK, MEASURED, legend, save_png
from sweeps.scaling.backtest import FURTHEST, Trial

COLUMNS = 3
OUTSIDE = "#b3261e"
PANEL = (4.6, 3.4)  # inches
TICKS = (1, 2, 3, 5, 10, 20, 30)
SHOWN = 3  # percent of the ends may lie beyond the frame: a forecast that ran away would flatten the others


def plot_backtest(found: Mapping[str, Sequence[Trial]], path: Path) -> None:
    """Writes a PNG: a panel a sweep, relative to each budget's measured loss; a bar is a forecast's 95% interval."""
    from matplotlib.figure import Figure

    shown = {name: trials for name, trials in found.items() if any(t.inside is not None for t in trials)}
    rows, columns = math.ceil(len(shown) / COLUMNS), min(len(shown), COLUMNS)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained", facecolor=GROUND)
    for place, (name, trials) in enumerate(shown.items(), 1):
        _panel(figure.add_subplot(rows, columns, place, facecolor=GROUND), name, trials, place == 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, path)


def _panel(axis: Any, name: str, trials: Sequence[Trial], first: bool) -> None:
    judged = [t for t in trials if t.inside is not None]
    for inside, colour, word in ((True, MEASURED, "measured inside"), (False, OUTSIDE, "measured outside")):
        part = [t for t in judged if t.inside is inside]
        beyond = [t.budget / t.from_budget for t in part]
        ends = [((t.interval.low, t.loss, t.interval.high), t.measured) for t in part]
        low, miss, high = 100 * (np.array([[x / y for x in xs] for xs, y in ends]).reshape(-1, 3).T - 1)
        style = {"fmt": "o", "ms": 4, "lw": 1, "alpha": 0.7}
        axis.errorbar(beyond, miss, yerr=[miss - low, high - miss], color=colour, label=word, **style)
    axis.axhline(0, color=INK, lw=1, ls="--", zorder=0)
    axis.set_xscale("log")
    axis.set_xticks(TICKS, [f"{tick}x" for tick in TICKS])
    axis.minorticks_off()
    axis.set_xlim(1.05, FURTHEST * 1.2)
    values = [100 * (x / t.measured - 1) for t in judged for x in (t.interval.low, t.loss, t.interval.high)]
    low, high = np.percentile(values, [SHOWN, 100 - SHOWN])
    axis.set_ylim(low - 0.2 * (high - low), high + 0.2 * (high - low))
    axis.grid(True, color=GRID, lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"{name}: {sum(bool(t.inside) for t in judged)} of {len(judged)} inside", fontsize=9, color=INK)
    axis.set_xlabel("budget forecast, over the largest fitted", fontsize=8)
    axis.set_ylabel("forecast over measured, %", fontsize=8)
    axis.tick_params(labelsize=8)
    if first:
        legend(axis)
