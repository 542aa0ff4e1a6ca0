"""Cleaning, exact dedup, split: from a source's documents to two files of text, with a count of what was dropped."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lm.data.files import DataError, sync, write_bytes
from lm.data.shards import SPLITS
from lm.data.sources import Document

# 128 bits of sha256: a clash among 1e12 documents has odds of 1e-15, at half the memory.
DIGEST_BYTES = 16
PART_BYTES = 2 << 20


@dataclass
class Report:
    """What became of a source's documents.

    Attributes:
        read: documents the source gave, lines that hold none included.
        malformed: lines that hold none (not JSON, no such column).
        not_text: not a string (null, number).
        invalid_unicode: bytes that are not UTF-8, or lone surrogates.
        empty: nothing but white space.
        duplicate: the same text as an earlier document of this or an earlier source.
        kept: documents of each split.
        kept_bytes: their UTF-8 bytes.
    """

    read: int = 0
    malformed: int = 0
    not_text: int = 0
    invalid_unicode: int = 0
    empty: int = 0
    duplicate: int = 0
    kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    kept_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def line(self) -> str:
        """What was kept and dropped, for people."""
        labels = {"duplicate": self.duplicate, "empty": self.empty, "not UTF-8": self.invalid_unicode}
        labels |= {"not text": self.not_text, "malformed": self.malformed}
        dropped = ", ".join(f"{count:,} {label}" for label, count in labels.items() if count)
        return (
            f"{self.kept['train']:,} train and {self.kept['validation']:,} validation documents,"
            f" {sum(self.kept_bytes.values()) / 1e6:.1f} MB; dropped: {dropped or 'none'}"
        )


def utf8_of(text: Any, report: Report) -> bytes | None:
    """UTF-8 bytes of a document, or None after counting why there are none."""
    if isinstance(text, bytes):
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError:
            report.invalid_unicode += 1
            return None
        encoded = text
    elif isinstance(text, str):
        decoded = text
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError:
            report.invalid_unicode += 1
            return None
    else:
        report.not_text += 1
        return None
    if not decoded or decoded.isspace():  # no copy, unlike strip: a document may be large
        report.empty += 1
        return None
    return encoded


def split_of(digest: bytes, group: str | None, validation_fraction: float) -> str:
    """Split of a document, from the hash of its text or of its group: the same whatever else is in the corpus."""
    key = digest if group is None else hashlib.sha256(b"group\x00" + group.encode("utf-8", "replace")).digest()
    return "validation" if int.from_bytes(key[:8], "little") < validation_fraction * 2.0**64 else "train"


@dataclass(frozen=True)
class TextPart:
    """Some documents of a text file, one after the other; small, so that it can be sent to whoever reads them.

    Attributes:
        path: of the text.
        start: byte at which the first begins.
        ends: byte after each; int64 [documents].
    """

    path: Path
    start: int
    ends: np.ndarray

    def sizes(self) -> np.ndarray:
        """UTF-8 bytes of each document; int64 [documents]."""
        return np.diff(self.ends, prepend=self.start)

    def texts(self) -> Iterator[str]:
        """The documents."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for size in self.sizes().tolist():
                yield file.read(size).decode()


class TextFile:
    """Documents of one split, back to back, with the end of each in a second file; read lazily, from any document."""

    def __init__(self, folder: Path, split: str) -> None:
        self.path = folder / f"{split}.text"
        self.ends_path = folder / f"{split}.ends"

    def ends(self) -> np.ndarray:
        """Byte position after each document; int64 [documents]."""
        return np.fromfile(self.ends_path, dtype="<i8")

    def texts(self, first: int = 0) -> Iterator[str]:
        """Documents from number `first` on."""
        for part in self.parts(first):
            yield from part.texts()

    def parts(self, first: int = 0) -> Iterator[TextPart]:
        """Documents from number `first` on, in parts of about PART_BYTES; a larger document is one by itself."""
        ends = self.ends()
        while first < len(ends):
            start = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, start + PART_BYTES, side="right")))
            yield TextPart(self.path, start, ends[first:last])
            first = last


def collect(
    documents: Iterable[Document], folder: Path, validation_fraction: float, seen: set[bytes]
) -> tuple[Report, set[bytes]]:
    """Write a source's documents to `folder` by split, without those dropped or already in `seen`.

    Returns:
        The report, and the digests of the documents kept.
    """
    report, own = Report(), set[bytes]()
    folder.mkdir(parents=True, exist_ok=True)
    targets = {split: TextFile(folder, split) for split in SPLITS}
    ends = {split: array("q") for split in SPLITS}
    files: dict[str, BinaryIO] = {split: target.path.open("wb") for split, target in targets.items()}
    try:
        for document in documents:
            report.read += 1
            if document.problem:
                report.malformed += 1
                continue
            text = utf8_of(document.text, report)
            if text is None:
                continue
            digest = hashlib.sha256(text).digest()
            if digest[:DIGEST_BYTES] in seen or digest[:DIGEST_BYTES] in own:
                report.duplicate += 1
                continue
            own.add(digest[:DIGEST_BYTES])
            split = split_of(digest, document.group, validation_fraction)
            files[split].write(text)
            report.kept[split] += 1
            report.kept_bytes[split] += len(text)
            ends[split].append(report.kept_bytes[split])
        for file in files.values():
            sync(file)
    finally:
        for file in files.values():
            file.close()
    for split, target in targets.items():
        write_bytes(target.ends_path, np.array(ends[split], dtype="<i8").tobytes())
    return report, own


def require_both_splits(name: str, report: Report) -> None:
    """Every source needs text to train and to validate on.

    Raises:
        DataError: a split is empty.
    """
    for split in SPLITS:
        if not report.kept[split]:
            raise DataError(
                f"source '{name}' has no {split} document ({report.read} read, {report.duplicate} duplicates,"
                f" {report.empty} empty, {report.invalid_unicode} not UTF-8, {report.malformed} malformed,"
                f" {report.not_text} not text);"
                " add documents or change validation_fraction"
            )
