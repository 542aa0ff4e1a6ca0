"""How often a run repeats each source, from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm.data.order import DataOrder
from lm.data.shards import Manifest

# Muennighoff et al. 2023 (arXiv 2305.16264): up to about 4 epochs are nearly as good as fresh data.
MAX_EPOCHS = 4.0


@dataclass(frozen=True)
class EpochRow:
    """One source of the epoch table; tokens of the train split, end-of-text included."""

    source: str
    documents: int
    unique_tokens: int
    bytes_per_token: float
    weight: float
    tokens_drawn: float
    epochs: float


def epoch_rows(manifest: Manifest, order: DataOrder, total_tokens: int) -> list[EpochRow]:
    """Epochs = tokens drawn / unique tokens, for a run of `total_tokens`. The weight is that of the whole run."""
    drawn = order.tokens_drawn(total_tokens)
    shares = order.tokens_drawn(max(total_tokens, 1))
    whole = sum(shares.values())
    rows = []
    for name in manifest.source_names:
        split = manifest.split(name, "train")
        tokens, documents = int(split["tokens"]), int(split["documents"])
        rows.append(
            EpochRow(
                source=name,
                documents=documents,
                unique_tokens=tokens,
                bytes_per_token=split["utf8_bytes"] / max(tokens - documents, 1),
                weight=shares[name] / whole,
                tokens_drawn=drawn[name],
                epochs=drawn[name] / max(tokens, 1),
            )
        )
    return rows


def repeat_warnings(rows: Sequence[EpochRow]) -> list[str]:
    """A line for each source that is read more than 4 times."""
    return [
        f"source '{row.source}' is repeated {row.epochs:.1f} times ({row.tokens_drawn:,.0f} tokens drawn from"
        f" {row.unique_tokens:,}); above {MAX_EPOCHS:.0f} epochs data is worth less: lower its weight or add text"
        for row in rows
        if row.epochs > MAX_EPOCHS
    ]


def format_table(rows: Sequence[EpochRow]) -> str:
    """The table as aligned text."""
    header = ("source", "documents", "unique tokens", "bytes/token", "weight", "tokens drawn", "epochs")
    body = [
        (
            row.source,
            f"{row.documents:,}",
            f"{row.unique_tokens:,}",
            f"{row.bytes_per_token:.3f}",
            f"{row.weight:.4f}",
            f"{row.tokens_drawn:,.0f}",
            f"{row.epochs:.2f}",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = []
    for line in (header, *body):
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        cells = [line[0].ljust(widths[0]), *numbers]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
