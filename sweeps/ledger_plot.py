"""Figure of the forecast ledger: predicted against measured, and each forecast's miss beside its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.ledger_rows import INSIDE, LATE_WORD, Row
from sweeps.ledger_score import score

COLOURS = {"inside": "#1a7f37", "outside": "#b3261e", "late": "0.6", "open": "black"}
SHOWN = 40  # newest forecasts of the right panel


def plot_ledger(rows: Sequence[Row], path: Path) -> None:
    """Writes a PNG: left, measured over predicted loss with 95% intervals; right, relative to the prediction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis in (left, right):
        axis.grid(True, color="0.9", lw=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    _against(left, [row for row in rows if math.isfinite(row.measured) and math.isfinite(row.low)])
    _misses(right, [row for row in rows if math.isfinite(row.low)][-SHOWN:])
    figure.suptitle(_title(rows), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")


def _title(rows: Sequence[Row]) -> str:
    total = score(rows)
    if not total.scored:
        return f"{len(rows)} forecasts, none decided yet"
    ends = total.share_interval
    return (
        f"{total.inside} of {total.scored} runs inside the 95% interval forecast before they began "
        f"({total.share:.0%}, 95% interval {ends.low:.0%} to {ends.high:.0%})"
    )


def _kind(row: Row) -> str:
    if row.status == LATE_WORD:
        return "late"
    if not row.scored:
        return "open"
    return "inside" if row.status == INSIDE else "outside"


def _against(axis: Any, rows: Sequence[Row]) -> None:
    named: set[str] = set()
    for row in rows:
        kind = _kind(row)
        label = None if kind in named else {"late": "late, not scored"}.get(kind, kind)
        named.add(kind)
        ends = [[max(row.loss - row.low, 0)], [max(row.high - row.loss, 0)]]
        axis.errorbar(
            [row.measured], [row.loss], yerr=ends, fmt="o", ms=5, color=COLOURS[kind], capsize=3, lw=1.2, label=label
        )
    if rows:
        span = [min(min(r.measured, r.low) for r in rows), max(max(r.measured, r.high) for r in rows)]
        axis.plot(span, span, "--", color="0.4", lw=1, label="as predicted", zorder=0)
        axis.legend(fontsize=8, frameon=False)
    else:
        axis.text(0.5, 0.5, "no run has finished yet", ha="center", color="0.4", transform=axis.transAxes)
    axis.set_xlabel("measured loss, nats per token")
    axis.set_ylabel("predicted loss and 95% interval, nats per token")


def _misses(axis: Any, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        colour = COLOURS[_kind(row)]
        low, high = 100 * (row.low / row.loss - 1), 100 * (row.high / row.loss - 1)
        axis.plot([low, high], [place, place], "-", color="0.75" if _kind(row) != "open" else "0.55", lw=5, zorder=1)
        if math.isfinite(row.measured):
            axis.plot([100 * row.error], [place], "o", ms=6, color=colour, mec="white", mew=0.8, zorder=3)
        elif row.scored:
            axis.text(high, place, f"  {row.status}", va="center", fontsize=8, color=colour)
        else:
            axis.text(high, place, f"  {row.status}", va="center", fontsize=8, color="0.4")
    axis.axvline(0, color="0.4", lw=1, ls="--", zorder=0)
    axis.set_yticks(range(len(rows)), [f"{row.c_flops:.2g} FLOPs  {row.forecast_id[:6]}" for row in rows], fontsize=8)
    axis.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axis.margins(x=0.18)
    axis.set_xlabel("measured loss (dot) and 95% interval (bar), % off the prediction")
