"""How long the documents of a source are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm.columns import aligned
from lm.data.shards import Manifest, TokenStream
from lm.data.slices import short_length, slice_of

Int64Array = NDArray[np.int64]
PERCENTILES = (10, 50, 90, 99)


def document_lengths(manifest: Manifest, name: str, split: str = "train") -> Iterator[Int64Array]:
    """Tokens of each document of a source or a slice of one, end-of-text included: int64, one array a shard."""
    part = slice_of(name, manifest.source_names)
    for _, ends in TokenStream(manifest, part.source, split).shard_ends():
        lengths: Int64Array = np.diff(ends, prepend=-1).astype(np.int64)
        yield lengths[(lengths >= part.at_least) & (lengths < part.below)]


@dataclass(frozen=True)
class LengthRow:
    """Lengths of the documents of one source, in tokens with end-of-text.

    Attributes:
        percentiles: of the documents, at 10, 50, 90 and 99%; the upper ends of buckets of 2^(1/8), so within 9%.
        longest: of all.
        at_least: length -> (share of the documents, share of the tokens) in documents of at least so many tokens.
    """

    source: str
    documents: int
    tokens: int
    percentiles: dict[int, int]
    longest: int
    at_least: dict[int, tuple[float, float]]


def length_row(manifest: Manifest, name: str) -> LengthRow:
    """Lengths of one source or slice; one pass over the document ends, memory of one shard's."""
    eighths = np.ceil(2 ** (np.arange(8 * 48) / 8)).astype(np.int64)  # up to 2^48
    edges = np.unique(eighths)
    documents, tokens = np.zeros(len(edges) + 1, np.int64), np.zeros(len(edges) + 1, np.int64)
    longest = 0
    for lengths in document_lengths(manifest, name):
        bucket = np.searchsorted(edges, lengths, side="right")  # edges[bucket - 1] <= length < edges[bucket]
        documents += np.bincount(bucket, minlength=len(documents))
        tokens += np.bincount(bucket, weights=lengths, minlength=len(tokens)).astype(np.int64)
        longest = max(longest, int(lengths.max(initial=0)))
    n, total = max(1, int(documents.sum())), max(1, int(tokens.sum()))
    below = np.cumsum(documents)
    quantiles = {q: int(edges[min(int(np.searchsorted(below, q / 100 * n)), len(edges) - 1)]) - 1 for q in PERCENTILES}
    at_least = {}
    for power in (1 << i for i in range(7, longest.bit_length())):
        first = int(np.searchsorted(edges, power)) + 1
        at_least[power] = float(documents[first:].sum() / n), float(tokens[first:].sum() / total)
    capped = {q: min(value, longest) for q, value in quantiles.items()}
    return LengthRow(name, int(documents.sum()), int(tokens.sum()), capped, longest, at_least)


def format_lengths(rows: Sequence[LengthRow]) -> str:
    """Two tables: percentiles, and the share of each source's tokens in documents of at least so many."""
    header = ("source", "documents", "tokens", "10%", "median", "90%", "99%", "longest")
    body = [
        (
            row.source,
            *(f"{value:,}" for value in (row.documents, row.tokens, *row.percentiles.values(), row.longest)),
        )
        for row in rows
    ]
    powers = sorted({power for row in rows for power in row.at_least})
    shares = [(row.source, *(f"{100 * row.at_least.get(power, (0, 0))[1]:.1f}" for power in powers)) for row in rows]
    names = ("source", *map(short_length, powers))
    return (
        f"tokens a document, end-of-text included\n{aligned([header, *body])}\n\n"
        f"% of the tokens in documents of at least so many\n{aligned([names, *shares])}"
    )
