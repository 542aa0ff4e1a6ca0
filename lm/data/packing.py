"""Which documents lie in which window, for best-fit packing: one index file a shard, made once and kept beside it.

DIR/<source>/<split>/shard-00000.packed-<T>-<key>    int64: 8 counts, then for W windows and P pieces
    first_piece [W + 1], tokens [W], labels [W], start [P], length [P]

A window is the pieces [first_piece[w], first_piece[w + 1]); a piece is `length` ids from `start` of its shard on. The
key names the shard's content, the length T and the range of document lengths, so an index is never read for another
shard.
Shards are packed one by one: memory is bounded by the documents of one shard, and an interrupted pass goes on with
the next shard.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.best_fit import best_fit, pieces_of
from lm.data.files import DataError, leftovers, sha256_file, sha256_json, write_bytes
from lm.data.plan import DataPlan
from lm.data.shards import ENDS_DTYPE, Manifest, TokenStream
from lm.data.slices import Slice, base_of, slice_of

# Of the file and of the packing; in the fingerprint of a run, which resumes under the same one only.
VERSION = 1
_DTYPE = np.dtype("<i8")

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class PackedCounts:
    """What packing a source into windows of one length gives.

    Attributes:
        windows: in all; an epoch is each once.
        tokens: of the documents, end-of-text included, each in one window.
        documents: in all.
        cut: documents longer than a window, which are cut. No other is.
    """

    windows: int
    tokens: int
    documents: int
    cut: int

    def padding(self, sequence_length: int) -> float:
        """Share of the positions that hold no token."""
        return 1 - self.tokens / (self.windows * sequence_length) if self.windows else 0.0


@dataclass(frozen=True)
class _Index:
    """One file, memory-mapped."""

    counts: PackedCounts
    first_piece: Int64Array
    tokens: Int64Array
    labels: Int64Array
    start: Int64Array
    length: Int64Array


class PackedStream:
    """One split of a source (or of a slice of one) in windows of T tokens; makes the index files that are missing.

    Raises:
        DataError: an index cannot be written, or one is damaged.
    """

    def __init__(self, manifest: Manifest, name: str, split: str, sequence_length: int) -> None:
        self._made_from = (manifest, name, split, sequence_length)
        part = slice_of(name, manifest.source_names)
        self._stream = TokenStream(manifest, part.source, split)
        rows = manifest.split(part.source, split)["shards"]
        folder = manifest.folder / part.source / split
        paths = [_path_of(folder, row, part, sequence_length) for row in rows]
        aside = [] if all(path.is_file() for path in paths) else leftovers(folder)
        self._shards = [
            _open_or_make(path, folder / row["file"], row["ends_sha256"], part, sequence_length, aside)
            for path, row in zip(paths, rows, strict=True)
        ]
        windows = [shard.counts.windows for shard in self._shards]
        self._first_window = np.concatenate([[0], np.cumsum(windows)]).astype(np.int64)
        self._shard_start = [start for start, _ in self._stream.shard_ends()]

    def __reduce__(self) -> tuple[type[PackedStream], tuple[Manifest, str, str, int]]:
        return PackedStream, self._made_from

    @property
    def counts(self) -> PackedCounts:
        """Sums over the shards."""
        names = [field.name for field in fields(PackedCounts)]
        return PackedCounts(*(sum(getattr(shard.counts, name) for shard in self._shards) for name in names))

    def labels(self, windows: Int64Array) -> Int64Array:
        """Labelled positions of each window; int64, same shape."""
        shards, local = self._find(windows)
        found = np.empty(len(windows), dtype=np.int64)
        for number in np.unique(shards):
            mask = shards == number
            found[mask] = self._shards[number].labels[local[mask]]
        return found

    def pieces(self, window: int) -> Iterator[tuple[int, int]]:
        """(start in the source, tokens) of each piece of a window."""
        shards, local = self._find(np.array([window], dtype=np.int64))
        index, shard_start = self._shards[int(shards[0])], self._shard_start[int(shards[0])]
        first, last = index.first_piece[local[0] : local[0] + 2].tolist()
        starts, lengths = index.start[first:last].tolist(), index.length[first:last].tolist()
        return ((shard_start + start, length) for start, length in zip(starts, lengths, strict=True))

    def read_into(self, start: int, out: NDArray[Any]) -> None:
        """Copy ids [start, start + len(out)) of the source into `out`."""
        self._stream.read_into(start, out)

    def _find(self, windows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(shard, window in it)."""
        shards = np.searchsorted(self._first_window, windows, side="right") - 1
        return shards, windows - self._first_window[shards]


def packed_counts(manifest: Manifest, plan: DataPlan) -> dict[tuple[str, int], PackedCounts] | None:
    """Windows of each (source or slice, sequence length) that a plan draws from; None for a plan that does not pack.

    Unknown sources are left out: whoever draws from them says so.
    """
    if plan.packing == "cut":
        return None
    tokens = manifest.tokens("train")
    drawn = {(name, stage.sequence_length) for stage in plan.stages for name, w in stage.weights.items() if w > 0}
    wanted = sorted((name, length) for name, length in drawn if base_of(name, tokens) in tokens)
    for name, length in wanted:
        source = base_of(name, tokens)
        if length > tokens[source]:
            # Packing would take memory in proportion to a length that is a slip of the pen.
            raise DataError(
                f"sequence_length {length} is longer than all {tokens[source]} tokens of source '{source}'; shorten it,"
                " set the source's weight to 0 or prepare more text"
            )
    return {(name, length): PackedStream(manifest, name, "train", length).counts for name, length in wanted}


def _path_of(folder: Path, row: dict[str, Any], part: Slice, sequence_length: int) -> Path:
    content = [VERSION, row["sha256"], row["ends_sha256"], part.at_least, part.below, sequence_length]
    return (folder / row["file"]).with_suffix(f".packed-{sequence_length}-{sha256_json(content)[:16]}")


def _open_or_make(
    path: Path, shard: Path, ends_sha256: str, part: Slice, sequence_length: int, aside: list[Path]
) -> _Index:
    """The index of a shard at `path`.

    Args:
        aside: half-written files of the folder; those of this index that are still there once its lock is held are
            of writers that were killed.
    """
    if not path.is_file():
        try:
            with _one_at_a_time(path) as alone:
                if not path.is_file():  # another process may have made it meanwhile
                    for left in aside if alone else []:
                        if left.name.startswith(f".{path.name}."):
                            left.unlink(missing_ok=True)
                    ends = _ends_of(shard, ends_sha256)
                    write_bytes(path, _index_of(ends, part, sequence_length).astype(_DTYPE).tobytes())
        except OSError as error:
            raise DataError(
                f"cannot write the index {path}: {error.strerror}; make it once where the folder can be written, with"
                f" python -m recipes.data table --packing best_fit --sequence-length {sequence_length}"
            ) from error
    return _open(path)


def _ends_of(shard: Path, digest: str) -> Int64Array:
    """Ends of the shard's documents, as they were prepared: an index of others would be kept, and read for good."""
    path = shard.with_suffix(".ends")
    if sha256_file(path) != digest:
        raise DataError(f"{path} is not what was prepared (another sha256); prepare it again with --overwrite")
    return np.fromfile(path, dtype=ENDS_DTYPE).astype(np.int64)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[bool]:
    """Wait for other processes on this index, where the file system has locks; without them several make the same.

    Gives whether nobody else is at it.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                alone = lock.stat().st_ino == os.fstat(file.fileno()).st_ino
            except FileNotFoundError:
                continue  # whoever held it is done and has removed it: another one may be held by now
            except OSError:
                alone = None
            if alone is False:
                continue
            try:
                yield bool(alone)
            finally:
                lock.unlink(missing_ok=True)
            return


def _index_of(ends: Int64Array, part: Slice, sequence_length: int) -> Int64Array:
    """The index of one shard as it is in the file.

    Args:
        ends: int64 [N], position of each document's end-of-text id.
    """
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
    lengths = ends + 1 - starts
    kept = (lengths >= part.at_least) & (lengths < part.below)
    starts, lengths = starts[kept], lengths[kept]
    document, offset, length = pieces_of(lengths, sequence_length)
    window = best_fit(length, sequence_length)
    n_windows = int(window.max()) + 1 if len(window) else 0
    tokens = np.bincount(window, weights=length, minlength=n_windows).astype(np.int64)  # exact: below 2^53
    whole = offset + length == lengths[document]  # ends with end-of-text, which has no label
    by_window = np.argsort(window, kind="stable")
    counts = [VERSION, n_windows, len(length), int(lengths.sum()), len(lengths), int((lengths > sequence_length).sum())]
    return np.concatenate(
        [
            np.array([*counts, 0, 0], dtype=np.int64),
            np.concatenate([[0], np.cumsum(np.bincount(window, minlength=n_windows))]).astype(np.int64),
            tokens,
            tokens - np.bincount(window, weights=whole, minlength=n_windows).astype(np.int64),
            (starts[document] + offset)[by_window],
            length[by_window],
        ]
    )


def _open(path: Path) -> _Index:
    values = np.asarray(np.memmap(path, dtype=_DTYPE, mode="r")) if path.stat().st_size >= 64 else np.zeros(8, np.int64)
    version, windows, pieces, tokens, documents, cut = values[:6].tolist()
    sizes = [8, windows + 1, windows, windows, pieces, pieces]
    if version != VERSION or len(values) != sum(sizes):
        raise DataError(f"{path} is damaged (not the size it says); delete it, it is made again")
    parts = np.split(values, np.cumsum(sizes)[:-1])[1:]
    return _Index(PackedCounts(windows, tokens, documents, cut), *parts)
