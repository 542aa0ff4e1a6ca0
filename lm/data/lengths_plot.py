"""How long the documents of each source are, as a plot: what to draw from for long windows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm.data.lengths import LengthRow
from lm.data.slices import short_length

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
_MARKERS = "osD^vP*X"


def plot_lengths(rows: Sequence[LengthRow], path: Path) -> None:
    """Share of each source's tokens in documents of at least N tokens, over N.

    The file ending of `path` says the format: png, svg or pdf.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for number, row in enumerate(rows):
        shares = [100 * tokens for _, tokens in row.at_least.values()]
        panel.plot(
            [*row.at_least, row.longest],
            [*shares, 0],
            label=f"{row.source}, {row.tokens:,} tokens",
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
        )
    lengths = sorted({length for row in rows for length in row.at_least})
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [short_length(length) for length in lengths])
    panel.minorticks_off()
    panel.set_ylim(0, 103)
    panel.set_xlabel("tokens a document, at least")
    panel.set_ylabel("% of the source's tokens")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=110)
