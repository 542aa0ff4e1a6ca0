"""What all figures share: figures without a display, palette, ticks, and SVG that takes its colours from the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.fit_report import quantity

# Ink, grid and ground of figures. Drawn as these three, they become the page's own colours in an inline SVG.
INK, GRID, GROUND = "#22252a", "#e3e4e8", "#fefefe"
COLOURS = {
    "isoflop": "#2f6fc4", "parametric": "#d0611f", "envelope": "#2f9a55", "isoflop_akima": "#1aa3b8",
    "parametric_linear": "#d9a021", "kaplan": "#9468c8",
}  # fmt: skip
OTHER = "#808790"
MEASURED = "#1a7f37"
_SHAPES = ("o", "s", "^", "D", "v", "P", "X")


def colour_of(approach: str) -> str:
    """One colour an approach, the same in every figure."""
    return COLOURS.get(approach, OTHER)


def figure(count: int = 1, size: tuple[float, float] = (5.4, 4.1)) -> tuple[Any, list[Any]]:
    """A figure and its axes in one row; size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor=GROUND)
    axes = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    for axis in axes:
        axis.set_facecolor(GROUND)
        axis.grid(True, which="major", color=GRID, lw=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(INK)
        axis.tick_params(colors=INK, which="both")
        for text in (axis.xaxis.label, axis.yaxis.label, axis.title):
            text.set_color(INK)
    return figure, axes


def legend(axis: Any, **options: Any) -> None:
    """A frameless legend in the figure's ink, where there is something to name."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(**{"fontsize": 8, "frameon": False, "labelcolor": INK, **options})


def save_png(figure: Any, path: Path) -> None:
    """Writes a PNG of good resolution."""
    figure.savefig(path, dpi=130)


def svg(figure: Any, title: str) -> str:
    """An inline SVG element: text stays text, ink and grid take the page's colours, nothing points outside.

    Args:
        title: what a screen reader says.
    """
    import matplotlib

    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    for colour, name in ((INK, "currentColor"), (GRID, "var(--grid)"), (GROUND, "var(--ground)")):
        text = text.replace(colour, name)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def ramp() -> Any:
    """Colours that are told apart on light and dark pages, for sizes and budgets, small to large."""
    import matplotlib
    import numpy as np
    from matplotlib.colors import ListedColormap

    return ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.15, 0.88, 64)))


def budget_colours(count: int) -> list[Any]:
    """One colour a budget, ascending."""
    return [ramp()(i / max(count - 1, 1)) for i in range(count)]


def shape_of(index: int) -> str:
    """A marker, for those who cannot go by colour."""
    return _SHAPES[index % len(_SHAPES)]


def size_ticks(axis: Any) -> None:
    """Ticks written as 100k, 2M: at 1, 2, 5 of each decade, or at decades only where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    subs: Sequence[float] = (1.0, 2.0, 5.0) if high / max(low, 1e-300) < 300 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
    axis.set_minor_formatter(NullFormatter())


def plain_ticks(axis: Any) -> None:
    """A loss axis spans less than a decade: a few plain numbers, not powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

    low, high = axis.get_ylim()
    ticks = [t for t in MaxNLocator(7).tick_values(low, high) if low <= t <= high]
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
