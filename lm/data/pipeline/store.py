"""Documents on disk between two stages: text back to back, ends, addresses; or positions in such a store."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lm.data.executor import Executor, Serial
from lm.data.files import sync, write_bytes

TEXT, ENDS, META, KEPT = "documents.text", "documents.ends", "documents.meta", "kept"
PART_BYTES = 4 << 20
PART_DOCUMENTS = 20_000

R = TypeVar("R")


@dataclass(frozen=True)
class Item:
    """One document between two stages.

    Attributes:
        text: UTF-8 bytes, or what was read (a page as its server sent it) where `extract` is still to come.
        url: where it is from, None if the source does not say.
        group: documents of one group go to the same split; None: by the text alone.
        snapshot: the crawl it belongs to, for stages of scope snapshot; None if the source does not say.
    """

    text: bytes
    url: str | None = None
    group: str | None = None
    snapshot: str | None = None

    @property
    def string(self) -> str:
        """The text of a document that is UTF-8."""
        return self.text.decode()


class StoreWriter:
    """Writes a store, document by document; what is there counts only after `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ends, self._position = array("q"), 0
        self._text, self._meta = (folder / TEXT).open("wb"), (folder / META).open("wb")

    def add(self, item: Item) -> None:
        """Append a document."""
        self._text.write(item.text)
        meta = [item.url, item.group] if item.snapshot is None else [item.url, item.group, item.snapshot]
        self._meta.write(json.dumps(meta).encode() + b"\n")
        self._position += len(item.text)
        self._ends.append(self._position)

    def close(self) -> None:
        """Flush to the disk."""
        for file in (self._text, self._meta):
            sync(file)
            file.close()
        write_bytes(self.folder / ENDS, np.array(self._ends, dtype="<i8").tobytes())


@dataclass(frozen=True)
class Part:
    """Some documents of a store, one after the other; small, so that it can be sent to whoever reads them.

    Attributes:
        base: folder of the store.
        lines: of the documents in the file of addresses; int64 [documents], rising.
        starts: of their texts in bytes; int64 [documents].
        stops: int64 [documents].
        line: of the file of addresses, from which it is read; at most lines[0].
        offset: of that line in bytes.
    """

    base: Path
    lines: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    line: int
    offset: int

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Item]:
        line = self.line
        with (self.base / TEXT).open("rb") as text, (self.base / META).open("rb") as meta:
            meta.seek(self.offset)
            for number, start, stop in zip(self.lines.tolist(), self.starts.tolist(), self.stops.tolist(), strict=True):
                for _ in range(number - line):
                    meta.readline()
                line = number + 1
                text.seek(start)
                about = json.loads(meta.readline())
                yield Item(text.read(stop - start), *about)


class Documents:
    """Documents of a store, all or those at some positions; read in order, any number of times, one at a time.

    Attributes:
        base: folder of the store.
        positions: int64 [documents], rising; None: all.
        executor: runs what `gather` asks for.
    """

    def __init__(
        self, base: Path, positions: NDArray[np.int64] | None = None, executor: Executor | None = None
    ) -> None:
        self.base, self.positions, self.executor = base, positions, executor or Serial()
        self._ends = np.fromfile(base / ENDS, dtype="<i8")

    def __len__(self) -> int:
        return len(self._ends) if self.positions is None else len(self.positions)

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each document; int64 [documents]."""
        sizes = np.diff(self._ends, prepend=0)
        return sizes if self.positions is None else sizes[self.positions]

    def subset(self, chosen: NDArray[np.int64]) -> Documents:
        """Those at some places among these; `chosen` int64, rising."""
        found = copy(self)  # with the same ends: there may be hundreds of subsets of a large store
        found.positions = chosen if self.positions is None else self.positions[chosen]
        return found

    def snapshots(self) -> list[str | None]:
        """Snapshot of each document."""
        with (self.base / META).open("rb") as meta:
            # One object a value, not one a document.
            found = [None if len(about) < 3 else sys.intern(about[2]) for about in map(json.loads, meta)]
        return found if self.positions is None else [found[position] for position in self.positions.tolist()]

    def __iter__(self) -> Iterator[Item]:
        for part in self.parts():
            yield from part

    def parts(self) -> Iterator[Part]:
        """All documents, in parts of about 4 MB (a larger document is one by itself) and 20,000 documents at most."""
        sizes = self.sizes()
        lines = np.arange(len(sizes)) if self.positions is None else self.positions
        stops = self._ends[lines]
        total = np.cumsum(sizes)
        first = line = offset = 0
        with (self.base / META).open("rb") as meta:
            while first < len(sizes):
                before = int(total[first - 1]) if first else 0
                last = int(np.searchsorted(total, before + PART_BYTES, side="right"))
                last = min(max(last, first + 1), first + PART_DOCUMENTS)
                here = slice(first, last)
                yield Part(self.base, lines[here], stops[here] - sizes[here], stops[here], line, offset)
                while line <= lines[last - 1]:
                    offset, line = offset + len(meta.readline()), line + 1
                first = last

    def gather(self, function: Callable[..., R], *arguments: Any) -> Iterator[R]:
        """function(part, *arguments) of each part, in order, on the executor's workers.

        Args:
            function: found by its name; its result depends on its arguments alone.
        """
        return self.executor.map(function, ((part, *arguments) for part in self.parts()))
