"""Part of a source by the length of its documents, read as if it were a source of its own.

A mix may name `web[>=8192]`, `web[<8192]` or `web[1024:8192]` (from 1,024 on, below 8,192): the documents of `web` with
so many tokens, end-of-text included, one after the other. Windows, epochs and permutations of a slice are those of a
prepared source that holds these documents alone, so the data order stays a function of k.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.shards import Manifest, TokenStream
from lm.errors import ConfigError

Int64Array = NDArray[np.int64]

_ENDLESS = 1 << 62
_PATTERN = re.compile(r"(?P<source>.+)\[(?:>=(?P<least>\d+)|<(?P<most>\d+)|(?P<low>\d+):(?P<high>\d+))\]")


@dataclass(frozen=True)
class Slice:
    """Documents of `source` with at least `at_least` and fewer than `below` tokens."""

    source: str
    at_least: int = 0
    below: int = _ENDLESS


def parse_slice(name: str) -> Slice | None:
    """What a name with a range means; None for a name without brackets.

    Raises:
        ConfigError: brackets that hold no range.
    """
    if "[" not in name:
        return None
    found = _PATTERN.fullmatch(name)
    if found is None:
        raise ConfigError(f"'{name}' in weights: write SOURCE[>=N], SOURCE[<N] or SOURCE[A:B], in tokens a document")
    least = int(found["least"] or found["low"] or 0)
    below = int(found["most"] or found["high"] or _ENDLESS)
    if least >= below:
        raise ConfigError(f"'{name}' in weights: no document has at least {least} and fewer than {below} tokens")
    return Slice(found["source"], least, below)


def short_length(tokens: int) -> str:
    """A power of two for a column or an axis: 512, 2k, 128k."""
    return f"{tokens >> 10}k" if tokens >= 1024 else str(tokens)


def slice_of(name: str, sources: Iterable[str]) -> Slice:
    """The documents that a name of a mix stands for; a prepared source keeps its name whatever it looks like."""
    return (None if name in sources else parse_slice(name)) or Slice(name)


def base_of(name: str, sources: Iterable[str]) -> str:
    """The source that a name of a mix belongs to."""
    return slice_of(name, sources).source


def stream_of(manifest: Manifest, name: str, split: str) -> TokenStream | SlicedStream:
    """Opens a source or a slice of one."""
    if name in manifest.source_names:
        return TokenStream(manifest, name, split)
    return SlicedStream(manifest, slice_of(name, manifest.source_names), split)


def train_tokens(manifest: Manifest, names: Iterable[str]) -> dict[str, int]:
    """Tokens of the train split of every source, then of the slices among `names`, sorted.

    Names of unknown sources are left out: whoever draws from them says so.
    """
    tokens = manifest.tokens("train")
    for name in sorted(set(names) - tokens.keys()):
        part = slice_of(name, tokens)
        if part.source in tokens:
            tokens[name] = SlicedStream(manifest, part, "train").n_tokens
    return tokens


def shared_tokens(manifest: Manifest, name: str, other: str) -> float:
    """Share of the tokens of a source (or slice) that another one holds too; train split."""
    one, two = (slice_of(each, manifest.source_names) for each in (name, other))
    if one.source != two.source:
        return 0.0
    both = Slice(one.source, max(one.at_least, two.at_least), min(one.below, two.below))
    if both == one:
        return 1.0
    found, whole = (SlicedStream(manifest, part, "train").n_tokens for part in (both, one))
    return found / max(1, whole)


@dataclass(frozen=True)
class _Runs:
    """Kept documents as runs of neighbours, R of them: as many numbers as there are changes, not documents."""

    start: Int64Array  # [R] where a run begins in the source
    virtual: Int64Array  # [R + 1] where it begins in the slice; the last is the slice's end
    first_document: Int64Array  # [R] documents of the source before it
    documents_before: Int64Array  # [R + 1] documents of the slice before it; the last is all of them


_SCANNED: dict[tuple[Any, ...], _Runs] = {}  # each slice is looked for once a process


class SlicedStream:
    """A slice of one split of a source, with the methods of TokenStream.

    Made by one pass over the document ends (8 bytes a document, memory-mapped); keeps 32 bytes a run of neighbouring
    documents that are in it.

    Attributes:
        n_tokens: ids in all, end-of-text included; 0 where no document has such a length.
        n_documents: documents in all.
    """

    def __init__(self, manifest: Manifest, part: Slice, split: str) -> None:
        self._made_from = (manifest, part, split)
        self._stream = TokenStream(manifest, part.source, split)
        key = (str(manifest.folder), manifest.content["shards_sha256"], part, split)
        if key not in _SCANNED:
            _SCANNED[key] = _scan(self._stream, part)
        self._runs = _SCANNED[key]
        self.n_tokens = int(self._runs.virtual[-1])
        self.n_documents = int(self._runs.documents_before[-1])

    def __reduce__(self) -> tuple[type[SlicedStream], tuple[Manifest, Slice, str]]:
        return SlicedStream, self._made_from

    def read_into(self, start: int, out: NDArray[Any]) -> None:
        """Copy ids [start, start + len(out)) of the slice into `out`."""
        runs = self._runs
        done, run = 0, int(np.searchsorted(runs.virtual, start, side="right")) - 1
        while done < len(out):
            offset = start + done - int(runs.virtual[run])
            take = min(len(out) - done, int(runs.virtual[run + 1] - runs.virtual[run]) - offset)
            self._stream.read_into(int(runs.start[run]) + offset, out[done : done + take])
            done += take
            run += 1

    def ends_before(self, positions: Int64Array) -> Int64Array:
        """Documents of the slice whose end-of-text id lies before each position; int64, same shape."""
        runs = self._runs
        run = np.clip(np.searchsorted(runs.virtual, positions, side="right") - 1, 0, len(runs.start) - 1)
        inside = self._stream.ends_before(runs.start[run] + positions - runs.virtual[run]) - runs.first_document[run]
        return runs.documents_before[run] + inside


def _scan(stream: TokenStream, part: Slice) -> _Runs:
    starts, tokens, first, documents = [], [], [], []
    seen = 0
    for shard_start, ends in stream.shard_ends():
        edges = np.concatenate([[0], ends.astype(np.int64) + 1])  # where each document begins, and the shard's end
        lengths = np.diff(edges)
        kept = (lengths >= part.at_least) & (lengths < part.below)
        turns = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
        begin, end = turns[::2], turns[1::2]
        starts.append(shard_start + edges[begin])
        tokens.append(edges[end] - edges[begin])
        first.append(seen + begin)
        documents.append(end - begin)
        seen += len(ends)
    return _Runs(_joined(starts), _summed(tokens), _joined(first), _summed(documents))


def _joined(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)


def _summed(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate([[0], np.cumsum(_joined(parts))]).astype(np.int64)
