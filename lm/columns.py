"""Tables as plain text. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], text_columns: Collection[int] | None = (0,)) -> str:
    """Rows of cells as lines with columns of one width, two spaces apart.

    Args:
        text_columns: those that begin at the left; the others, numbers, end at the right. None: all.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if text_columns is None or i in text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
