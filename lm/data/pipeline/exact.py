"""Exact duplicates: whole documents, and paragraphs that came before in the source."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, AnyStr

from lm.data.pipeline.stage import FRACTION, Dropped, Kept, Outcome, Range, StageKind
from lm.data.pipeline.store import Documents, Part

_DIGEST_BYTES = 16  # 128 bits: a clash among 1e12 texts has odds of 1e-15
_CHUNK = 1 << 20  # of a text at a time: the list of the words of 100 MB takes 1 GB
_EMPTY_LINES = re.compile(r"((?:\r\n|\n|\r(?!\n))[ \t]*(?:\r\n|\n|\r(?!\n)))")  # line ends of any system
_SPACE: dict[type, Any] = {str: re.compile(r"\s"), bytes: re.compile(rb"\s")}  # what split() takes for white space


def single_spaced(text: AnyStr, chunk: int = _CHUNK) -> AnyStr:
    """The text with one space for each run of white space, none at its ends."""
    space: Any = b" " if isinstance(text, bytes) else " "
    if len(text) <= chunk:
        return space.join(text.split())
    return space.join(piece for piece in (space.join(part.split()) for part in _parts(text, chunk)) if piece)


def _parts(text: AnyStr, chunk: int) -> Iterator[AnyStr]:
    """The text in parts of `chunk` or more, that end before white space."""
    start = 0
    while start < len(text):
        match = _SPACE[type(text)].search(text, start + chunk)
        end = match.start() if match else len(text)
        yield text[start:end]
        start = end


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()[:_DIGEST_BYTES]


def exact_documents(documents: Documents, options: dict[str, Any]) -> Iterator[Outcome]:
    """Drop a document whose text, white space aside, is that of an earlier one of the source."""
    seen: set[bytes] = set()
    for digest in chain.from_iterable(documents.gather(_part_digests)):
        if digest in seen:
            yield Dropped("same text as an earlier document")
        else:
            seen.add(digest)
            yield Kept()


def _part_digests(part: Part) -> list[bytes]:
    return [_digest(single_spaced(item.text)) for item in part]


def exact_paragraphs(documents: Documents, options: dict[str, Any]) -> Iterator[Outcome]:
    """Cut paragraphs (between empty lines) that came before in the source, if they are long enough to say something.

    A document of which less than `min_kept_fraction` of its bytes is left goes: what is left is a stump.
    """
    least, fraction = options["min_characters"], options["min_kept_fraction"]
    seen: set[bytes] = set()
    for item in documents:
        parts = _EMPTY_LINES.split(item.string)
        paragraphs, between = parts[::2], ["", *parts[1::2]]
        kept: list[str] = []
        for before, paragraph in zip(between, paragraphs, strict=True):
            plain = single_spaced(paragraph)
            digest = _digest(plain.encode())
            if len(plain) < least or digest not in seen:
                kept.append((before if kept else "") + paragraph)
            if len(plain) >= least:
                seen.add(digest)
        cut = len(paragraphs) - len(kept)
        text = "".join(kept).encode()
        if cut == 0:
            yield Kept()
        elif not text.strip() or len(text) < fraction * len(item.text):
            yield Dropped("little left without repeated paragraphs", f"{cut} of {len(paragraphs)} paragraphs repeated")
        else:
            yield Kept(text, {"paragraphs cut": cut})


KINDS = {
    "exact_documents": StageKind(exact_documents, compares=True),
    "exact_paragraphs": StageKind(
        exact_paragraphs,
        {"min_characters": 100, "min_kept_fraction": 0.3},
        {"min_characters": Range(1, 1e9), "min_kept_fraction": FRACTION},
        changes=True,
        compares=True,
        version=2,
    ),
}
