"""A tokenizer's split into pieces by Python's `re`, and texts cut where no piece is cut.

`tokenizers` finds pieces with Oniguruma, at a fifth of the speed of `re`. The two know letters and digits of different
Unicode versions: characters on which they differ are found by asking both, once, and left to `tokenizers`.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

SEGMENT_CHARACTERS = 1 << 20
_ASKED = (range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))  # beyond: unassigned or private, not trusted
_SPACES = r"\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
# A letter or digit, then a mark or space: the pieces of SPLIT_PATTERN that hold a letter or digit end with one.
_CUT = re.compile(r"[^\W_](?=[\s!-/:-@\[-`{-~、。，])")


def _ranges(characters: list[str]) -> str:
    """The inside of a character class; from characters in rising order."""
    found: list[list[int]] = []
    for code in map(ord, characters):
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in found)


@cache
def _other_numbers() -> str:
    """Numbers that are no decimal digits (½, Ⅷ), which Python counts as letters; of the first plane."""
    codes = (chr(code) for code in range(0x10000))
    return _ranges([c for c in codes if unicodedata.category(c) in ("No", "Nl") and re.match(r"\w", c)])


@cache
def piece_pattern(split_pattern: str) -> re.Pattern[str]:
    r"""`split_pattern`, of \p{L}, \p{N}, \s and \S, for texts without `odd_characters`."""
    numbers = _other_numbers()
    letter, digit = rf"[^\W\d_{numbers}]", rf"[\d{numbers}]"
    # Longest first; classes that leave out letters and digits take the underscore, which is part of \w.
    translated = split_pattern
    for old, new in (
        (r"[^\r\n\p{L}\p{N}]", r"(?:[^\r\n\w]|_)"),
        (r"[^\s\p{L}\p{N}]", rf"(?:[^\w{_SPACES}]|_)"),
        (r"\p{L}", letter),
        (r"\p{N}", digit),
        (r"(?!\S)", rf"(?![^{_SPACES}])"),
        (r"\s", f"[{_SPACES}]"),
    ):
        translated = translated.replace(old, new)
    return re.compile(translated)


@cache
def odd_characters() -> re.Pattern[str]:
    """Characters that Oniguruma and `piece_pattern` may not see alike."""
    from tokenizers import Regex, normalizers

    asked = "".join(map(chr, (code for codes in _ASKED for code in codes)))
    numbers = _other_numbers()
    odd: set[str] = set()
    for theirs, ours in (
        (r"\p{L}", rf"[^\W\d_{numbers}]"),
        (r"\p{N}", rf"[\d{numbers}]"),
        (r"\s", f"[{_SPACES}]"),
    ):
        seen = normalizers.Replace(Regex(f"[^{theirs}]"), "").normalize_str(asked)
        odd |= set(seen) ^ set(re.findall(ours, asked))
    beyond = rf"\U00040000-\U000dffff\U000e1000-\U{sys.maxunicode:08x}"
    return re.compile(f"[{_ranges(sorted(odd))}{beyond}]")


def segments(text: str) -> Iterator[str]:
    """A text in segments of about a million characters that end where a piece of SPLIT_PATTERN ends.

    A run of a million letters without a space or mark stays in one segment.
    """
    start = 0
    while len(text) - start > SEGMENT_CHARACTERS:
        match = _CUT.search(text, start + SEGMENT_CHARACTERS)
        while match is not None and not match.group().isascii() and odd_characters().match(match.group()):
            match = _CUT.search(text, match.end())
        if match is None:
            break
        yield text[start : match.end()]
        start = match.end()
    yield text[start:] if start else text
