"""Repeated substrings of 50 words or more by a suffix array (Lee et al. 2022, arXiv 2107.06499, section 4.1).

The documents of a shard are one sequence of words, a mark of its own after each document. A run of `min_tokens` words
that occurs earlier in the shard is cut; its first occurrence stays. Words are those of lm.data.words, so that case,
punctuation and white space do not hide a repeat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.files import DataError
from lm.data.pipeline.stage import FRACTION, Dropped, Kept, Outcome, Range, StageKind
from lm.data.pipeline.store import Documents
from lm.data.words import word_pattern

_VOCABULARY = 1 << 20  # words whose hash is remembered
_CHUNK = 1 << 22  # of a suffix array at a time
_LONG_CHARACTERS = 1 << 20  # of a text whose words are not held all at once

_APART = "searched apart from the documents before (shard_bytes)"


class _TokenHashes(dict[str, int]):
    """Token -> 64-bit hash of its lower case; remembers a bounded number of them."""

    def __missing__(self, token: str) -> int:
        digest = hashlib.blake2b(token.lower().encode(), digest_size=8).digest()
        found = int.from_bytes(digest, "little", signed=True)
        if len(self) < _VOCABULARY:
            self[token] = found
        return found

    def of(self, text: str) -> NDArray[np.int64]:
        """Hashes of a text's tokens; int64 [tokens]."""
        pattern = word_pattern(text)
        if len(text) < _LONG_CHARACTERS:
            return np.array([self[token] for token in pattern.findall(text)], np.int64)
        return np.fromiter((self[match.group()] for match in pattern.finditer(text)), np.int64)


def repeated(sequences: Sequence[NDArray[np.int64]], n: int) -> list[NDArray[np.bool_]]:
    """Which tokens to cut so that no run of n or more is left that occurs earlier.

    A run of n tokens that occurs earlier, first at q, is cut but for what it shares with that first occurrence: tokens
    [max(p, q + n), p + n) for one that starts at p. So every run loses its last token at least, and what repeats
    itself at once ("ha ha ha ...") keeps n tokens. Memory: about 40 bytes a token.

    Args:
        sequences: int64 [tokens] each, equal where tokens are; runs do not cross from one to the next.

    Returns:
        bool [tokens] each.
    """
    from pydivsufsort import divsufsort

    if not sequences:
        return []
    lengths = [len(sequence) for sequence in sequences]
    starts = np.cumsum([0, *(length + 1 for length in lengths)])
    tokens = np.concatenate([np.empty(0, np.int64), *sequences])
    del sequences  # 8 bytes a token, if nobody else holds them
    codes = _codes(tokens, lengths)
    del tokens
    # Suffixes of the bytes that start at a token, sorted, are suffixes of tokens, sorted: all tokens are as wide.
    order = divsufsort(codes.view(np.uint8))
    chunks = (order[i : i + _CHUNK] for i in range(0, len(order), _CHUNK))
    order = np.concatenate([chunk[chunk & 3 == 0] >> 2 for chunk in chunks])
    cut = _cut(*_repeats(codes, order, n), n, len(codes))
    return [cut[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _codes(tokens: NDArray[np.int64], lengths: list[int]) -> NDArray[np.uint32]:
    """Tokens as small numbers, and after each sequence a number that comes once; uint32 [tokens + sequences]."""
    order = np.argsort(tokens)  # np.unique gives the same numbers for twice the memory
    other = np.ones(len(tokens), bool)
    other[1:] = np.diff(tokens[order]) != 0
    numbers = np.empty(len(tokens), np.uint32)
    numbers[order] = np.cumsum(other, dtype=np.uint32)
    del order, other
    codes = np.empty(len(numbers) + len(lengths), np.uint32)
    position = taken = 0
    for mark, length in enumerate(lengths):
        end = position + length
        codes[position:end] = numbers[taken : taken + length]
        codes[end] = 0xFFFFFFFF - mark
        position, taken = end + 1, taken + length
    return codes


def _repeats(codes: NDArray[np.uint32], order: NDArray[Any], n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(start, start of its first occurrence) of each run of n tokens that occurs earlier; int64 [runs] each.

    Args:
        order: the suffix array of `codes`, where runs of n equal tokens stand side by side.
    """
    alike = np.arange(1, len(order), dtype=order.dtype)  # places whose suffix begins as the one before, so far
    for k in range(n):  # a mark comes once, so that no comparison goes beyond the end
        alike = alike[codes[order[alike - 1] + k] == codes[order[alike] + k]]
        if not len(alike):
            break
    new = np.ones(len(alike), bool)  # does a group of equal runs begin here?
    new[1:] = np.diff(alike) > 1
    heads = np.flatnonzero(new)
    if not len(heads):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    opening = order[alike[heads] - 1].astype(np.int64)  # of each group, the member that is not in `alike`
    first = np.minimum(np.minimum.reduceat(order[alike], heads), opening)
    group = np.cumsum(new) - 1
    start = np.concatenate([order[alike], opening])
    origin = np.concatenate([first[group], first])
    later = start > origin
    return start[later], origin[later]


def _cut(start: NDArray[np.int64], origin: NDArray[np.int64], n: int, length: int) -> NDArray[np.bool_]:
    """Union of [max(start, origin + n), start + n); bool [length]."""
    change = np.bincount(np.maximum(start, origin + n), minlength=length + 1).astype(np.int32)
    change -= np.bincount(start + n, minlength=length + 1).astype(np.int32)
    return np.cumsum(change[:-1]) > 0


def without(text: str, cut: NDArray[np.bool_]) -> tuple[str, int]:
    """The text without the tokens of `cut`, and how many runs went.

    What stands between a cut token and the next goes with it, but for line feeds and what follows them.
    """
    kept, runs, position, before = [], 0, 0, False
    for match, gone in zip(word_pattern(text).finditer(text), cut, strict=True):
        if gone and not before:
            kept.append(text[position : match.start()])
            runs += 1
        elif before and not gone:
            position = _resume(text, position, match.start())
            if position and kept[-1] and not (kept[-1][-1].isspace() or text[position].isspace()):
                kept.append(" ")  # or two words might become one
        if gone:
            position = match.end()
        before = gone
    if before:
        position = _resume(text, position, len(text))
    return "".join([*kept, text[position:]]), runs


def _resume(text: str, cut_end: int, next_token: int) -> int:
    """Where a text goes on after a cut: at the first line feed, or else at the next token."""
    line = text.find("\n", cut_end, next_token)
    return next_token if line < 0 else line


def repeated_substrings(documents: Documents, options: dict[str, Any]) -> Iterator[Outcome]:
    """Cut runs of words that occur earlier, or drop documents that consist of them. Memory: a shard at a time.

    A shard is `shard_bytes` of documents; a longer document is searched in parts, each by itself.
    """
    kind = "repeated_substrings"
    n, size = options["min_tokens"], options["shard_bytes"]
    most, cut = options["max_repeated_fraction"], options["action"] == "cut"
    try:
        import pydivsufsort  # noqa: F401
    except ImportError:
        raise DataError(f"stage {kind} needs pydivsufsort; install it: pip install 'scalewright[data]'") from None
    hashes = _TokenHashes()
    apart = 0  # shards and parts that began since a kept document could say so
    for number, texts in enumerate(_shards(documents, size)):
        apart += number > 0
        if len(texts[0]) > size:
            pieces = _parts(texts[0].decode(), size)
            apart += len(pieces) - 1
            found = iter([[repeated([hashes.of(piece)], n)[0] for piece in pieces]])
        else:
            found = ([mask] for mask in repeated([hashes.of(text.decode()) for text in texts], n))
        for text, masks in zip(texts, found, strict=True):
            outcome = _outcome(text, size, masks, most, cut)
            if isinstance(outcome, Kept) and apart:
                outcome = Kept(outcome.text, {**outcome.notes, _APART: apart}, outcome.detail)
                apart = 0
            yield outcome


def _shards(documents: Documents, size: int) -> Iterator[list[bytes]]:
    """Texts of documents that fill `size` bytes, or of one that is longer."""
    shard: list[bytes] = []
    held = 0
    for item in documents:
        if shard and held + len(item.text) > size:
            yield shard
            shard, held = [], 0
        shard.append(item.text)
        held += len(item.text)
    if shard:
        yield shard


def _parts(text: str, size: int) -> list[str]:
    """The text in parts of `size` characters."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def _outcome(whole: bytes, size: int, masks: list[NDArray[np.bool_]], most: float, cut: bool) -> Outcome:
    tokens, gone = sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)
    if not gone:
        return Kept()
    if gone > most * tokens:
        return Dropped("mostly repeated substrings", f"{gone:,} of {tokens:,} words occur earlier")
    if not cut:
        return Kept()
    left = [without(piece, mask) for piece, mask in zip(_parts(whole.decode(), size), masks, strict=True)]
    text = "".join(part for part, _ in left)
    if not text.strip():
        return Dropped("mostly repeated substrings", f"{gone:,} of {tokens:,} words occur earlier")
    runs = sum(number for _, number in left)
    return Kept(text.encode(), {"repeated runs cut": runs, "repeated words cut": gone}, f"{gone:,} of {tokens:,} words")


KINDS = {
    "repeated_substrings": StageKind(
        repeated_substrings,
        {"min_tokens": 50, "action": "cut", "max_repeated_fraction": 0.7, "shard_bytes": 64_000_000},
        {
            "min_tokens": Range(2, 1e6, True),
            "action": ("cut", "drop"),
            "max_repeated_fraction": FRACTION,
            "shard_bytes": Range(1, 1e10, True),
        },
        changes=True,
        compares=True,
        packages=("pydivsufsort",),
        version=2,
    )
}
