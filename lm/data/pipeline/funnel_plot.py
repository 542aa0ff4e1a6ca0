"""The funnel as a plot: what is left of a source's bytes after each stage, and what the stage took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_KEPT, _TAKEN = "#4477aa", "#ee8866"


def plot_funnel(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel a source, one bar a stage; bytes, with documents and the commonest reason written beside."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    heights = [len(stages) + 1.6 for stages in rows.values()]
    figure = Figure(figsize=(11, 0.42 * sum(heights) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, (source, stages) in zip(panels, rows.items(), strict=True):
        widest = max(max(row["bytes_in"] or 0, row["bytes_out"]) for row in stages) or 1
        for place, row in enumerate(stages):
            taken = max(0, (row["bytes_in"] or row["bytes_out"]) - row["bytes_out"])
            panel.barh(place, row["bytes_out"], color=_KEPT)
            panel.barh(place, taken, left=row["bytes_out"], color=_TAKEN)
            panel.text(row["bytes_out"] + taken + 0.01 * widest, place, _label(row), va="center", fontsize=8)
        panel.set_yticks(range(len(stages)), [row["stage"] for row in stages], fontsize=9)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.55 * widest)
        unit, name = (1e6, "MB") if widest >= 1e5 else (1e3, "kB")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: f"{value / unit:g}"))
        panel.set_xlabel(f"{name} of text", fontsize=9)
        panel.set_title(f"{source}: left after each stage (blue), taken by it (orange)", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _label(row: dict[str, Any]) -> str:
    gone = row["documents_in"] - row["documents_out"]
    text = f"{row['documents_out']:,} documents"
    if gone:
        reason = next(iter(row["dropped"]), "")
        text += f", -{gone:,} ({reason}{', ...' if len(row['dropped']) > 1 else ''})"
    return text
