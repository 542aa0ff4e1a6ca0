"""A long text in segments for a tokenizer with a split of its own: cut where that split itself shows that no piece is.

Byte-pair encoding sees one piece at a time, so the ids of a text are those of its segments if every cut is an end of a
piece, and pieces on either side are what they are in the whole. The tokenizer's own split is asked about both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from lm.data.pieces import SEGMENT_CHARACTERS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CANDIDATE = re.compile(r"[^\W_](?=[ \n])")
_CANDIDATES = 100  # asked about; where none will do, a text stays whole
_AROUND = (1000, 777)  # characters on each side that are looked at: two, so that it does not hang on where they begin
_LOCAL = ("Split", "ByteLevel", "Digits", "Punctuation", "Sequence")  # look at characters beside each other only


def cuts_nothing(tokenizer: Tokenizer) -> bool:
    """Whether ids can be those of segments: pieces by a split of characters, nothing done to the text before."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    model, added = content["model"], content["added_tokens"]
    plain = content["normalizer"] is None and all(token["special"] for token in added)
    return plain and model["type"] == "BPE" and not model.get("dropout") and _is_local(content["pre_tokenizer"])


def _is_local(split: dict[str, Any] | None) -> bool:
    if split is None or split["type"] not in _LOCAL or split.get("add_prefix_space"):
        return False
    return all(_is_local(part) for part in split.get("pretokenizers", ()))


def own_segments(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """A text in segments of about a million characters, for a tokenizer that `cuts_nothing`."""
    start = 0
    while len(text) - start > SEGMENT_CHARACTERS:
        found = islice(_CANDIDATE.finditer(text, start + SEGMENT_CHARACTERS), _CANDIDATES)
        cut = next((match.end() for match in found if _may_cut(tokenizer, text, match.end())), None)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


def _may_cut(tokenizer: Tokenizer, text: str, cut: int) -> bool:
    def pieces(part: str) -> list[str]:
        return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part)]

    sides = ((text[max(0, cut - size) : cut], text[cut : cut + size]) for size in _AROUND)
    return all(pieces(before + after) == pieces(before) + pieces(after) for before, after in sides)
