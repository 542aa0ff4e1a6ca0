"""Documents on disk between two stages: text back to back, ends, addresses; or positions in such a store."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lm.data.files import sync, write_bytes

TEXT, ENDS, META, KEPT = "documents.text", "documents.ends", "documents.meta", "kept"


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


class Documents:
    """Documents of a store, all or those at some positions; read in order, any number of times, one at a time.

    Attributes:
        base: folder of the store.
        positions: int64 [documents], rising; None: all.
    """

    def __init__(self, base: Path, positions: NDArray[np.int64] | None = None) -> None:
        self.base, self.positions = base, positions
        self._ends = np.fromfile(base / ENDS, dtype="<i8")

    def __len__(self) -> int:
        return len(self._ends) if self.positions is None else len(self.positions)

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each document; int64 [documents]."""
        sizes = np.diff(self._ends, prepend=0)
        return sizes if self.positions is None else sizes[self.positions]

    def subset(self, chosen: NDArray[np.int64]) -> Documents:
        """Those at some places among these; `chosen` int64, rising."""
        return Documents(self.base, chosen if self.positions is None else self.positions[chosen])

    def snapshots(self) -> list[str | None]:
        """Snapshot of each document."""
        with (self.base / META).open("rb") as meta:
            # One object a value, not one a document.
            found = [None if len(about) < 3 else sys.intern(about[2]) for about in map(json.loads, meta)]
        return found if self.positions is None else [found[position] for position in self.positions.tolist()]

    def __iter__(self) -> Iterator[Item]:
        wanted = np.arange(len(self._ends)) if self.positions is None else self.positions
        line = 0
        with (self.base / TEXT).open("rb") as text, (self.base / META).open("rb") as meta:
            for position in wanted.tolist():
                for _ in range(position - line):
                    meta.readline()
                line = position + 1
                start = int(self._ends[position - 1]) if position else 0
                text.seek(start)
                about = json.loads(meta.readline())
                yield Item(text.read(int(self._ends[position]) - start), *about)
