"""What windows do to documents: how many are cut, how much of the windows is padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm.columns import aligned
from lm.data.lengths import document_lengths
from lm.data.packing import PackedCounts
from lm.data.plan import DataPlan
from lm.data.shards import Manifest

Int64Array = NDArray[np.int64]
PackedWindows = Mapping[tuple[str, int], PackedCounts] | None


@dataclass(frozen=True)
class FragmentationRow:
    """One source (or slice of one) at one sequence length, train split.

    Attributes:
        documents: in all.
        cut: documents that do not lie in one window.
        padding: share of the positions of the source's windows that hold no token.
    """

    source: str
    sequence_length: int
    documents: int
    cut: int
    windows: int
    padding: float


def fragmentation_rows(manifest: Manifest, plan: DataPlan, packed: PackedWindows) -> list[FragmentationRow]:
    """A row for each source and sequence length that the plan draws from; one pass over the document ends.

    Args:
        packed: windows of a plan that packs, see lm.data.packing; None for one that cuts.
    """
    wanted = [(name, stage.sequence_length) for stage in plan.stages for name, w in stage.weights.items() if w > 0]
    rows = []
    for name, T in dict.fromkeys(wanted):
        if packed is None:
            documents, cut, tokens = _count_cut(manifest, name, T)
            rows.append(FragmentationRow(name, T, documents, cut, max(0, tokens - 1) // T, 0.0))
        else:
            counts = packed[name, T]
            rows.append(FragmentationRow(name, T, counts.documents, counts.cut, counts.windows, counts.padding(T)))
    return rows


def format_fragmentation(packing: str, rows: Sequence[FragmentationRow]) -> str:
    """The rows as aligned text, under the packing that they belong to."""
    header = ("source", "sequence length", "documents", "cut", "cut, %", "windows", "padding, %")
    body = [
        (
            row.source,
            f"{row.sequence_length:,}",
            f"{row.documents:,}",
            f"{row.cut:,}",
            f"{100 * row.cut / max(1, row.documents):.2f}",
            f"{row.windows:,}",
            f"{100 * row.padding:.3f}",
        )
        for row in rows
    ]
    return f"packing: {packing}\n{aligned([header, *body])}"


def _count_cut(manifest: Manifest, name: str, sequence_length: int) -> tuple[int, int, int]:
    """(documents, those that a window's end cuts, tokens) of documents one after the other."""
    documents, cut, tokens = 0, 0, 0
    for lengths in document_lengths(manifest, name):
        stops = tokens + np.cumsum(lengths)
        cut += int(np.sum((stops - lengths) // sequence_length != (stops - 1) // sequence_length))
        documents, tokens = documents + len(lengths), tokens + int(lengths.sum())
    return documents, cut, tokens
