"""Exact duplicates: whole documents, and paragraphs that came before in the source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

from lm.data.pipeline.stage import Dropped, Kept, Outcome, StageKind, number_option
from lm.data.pipeline.store import Documents, Part

_DIGEST_BYTES = 16  # 128 bits: a clash among 1e12 texts has odds of 1e-15


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
    return [_digest(b" ".join(item.text.split())) for item in part]


def exact_paragraphs(documents: Documents, options: dict[str, Any]) -> Iterator[Outcome]:
    """Cut paragraphs (between empty lines) that came before in the source, if they are long enough to say something.

    A document of which less than `min_kept_fraction` of its bytes is left goes: what is left is a stump.
    """
    least = number_option("exact_paragraphs", options, "min_characters", 1, 1e9)
    fraction = number_option("exact_paragraphs", options, "min_kept_fraction", 0, 1)
    seen: set[bytes] = set()
    for item in documents:
        paragraphs = item.string.split("\n\n")
        kept = []
        for paragraph in paragraphs:
            plain = " ".join(paragraph.split())
            digest = _digest(plain.encode())
            if len(plain) < least or digest not in seen:
                kept.append(paragraph)
            if len(plain) >= least:
                seen.add(digest)
        cut = len(paragraphs) - len(kept)
        text = "\n\n".join(kept).encode()
        if cut == 0:
            yield Kept()
        elif not text.strip() or len(text) < fraction * len(item.text):
            yield Dropped("little left without repeated paragraphs", f"{cut} of {len(paragraphs)} paragraphs repeated")
        else:
            yield Kept(text, {"paragraphs cut": cut})


KINDS = {
    "exact_documents": StageKind(exact_documents),
    "exact_paragraphs": StageKind(exact_paragraphs, {"min_characters": 100, "min_kept_fraction": 0.3}, changes=True),
}
