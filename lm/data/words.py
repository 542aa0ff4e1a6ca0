"""The word rule of everything that compares texts: duplicates, blocklists, decontamination, contamination.

Words are runs of letters (with their marks) and digits. In scripts that are written without spaces between words each
letter is one: a run of them is a clause, and two texts that differ in one letter of it would share no word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LEAST_WORDS = 5  # of a text that may be looked up
LEAST_LETTERS = 10  # the same where a letter is a word: two Han characters say about what an English word does

# Vowel signs and points are marks, which \w leaves out: without them every Telugu or Hindi word falls into letters.
MARKS = r"\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0963\u0966-\u0dff"
MARKS += r"\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1-\u0ebc\u0ec8-\u0ecd\u102b-\u103e\u17b4-\u17d3"
# Thai, Lao, Burmese, Khmer, kana, Han.
_UNSPACED = r"\u0e01-\u0e5b\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
_UNSPACED += r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_LETTER = rf"(?![\W_])[{_UNSPACED}]"  # the ranges hold punctuation too
_WORD = re.compile(rf"[^\W_{_UNSPACED}]+(?:[{MARKS}]+[^\W_{_UNSPACED}]*)*|{_LETTER}[{MARKS}]*")
_ASCII_WORD = re.compile(r"[A-Za-z0-9]+")  # the same for such text, at half the time
_UNSPACED_WORD = re.compile(_LETTER)
_UNSPACED_LETTER = re.compile(rf"({_LETTER}[{MARKS}]*)")


def word_pattern(text: str) -> re.Pattern[str]:
    """What a word of the text is, in either case; matches do not overlap and never end within a word."""
    return _ASCII_WORD if text.isascii() else _WORD


def words(text: str) -> list[str]:
    """The words in lower case."""
    return word_pattern(text).findall(text.lower())


def each_word(text: str) -> Iterator[str]:
    """As `words`, one at a time: of a text of 100 MB the list of its words takes 1 GB."""
    return (match.group() for match in word_pattern(text).finditer(text.lower()))


def spaced_letters(text: str) -> str:
    """The text with spaces around each letter of the scripts that are written without them."""
    return text if text.isascii() else _UNSPACED_LETTER.sub(r" \1 ", text)


def ngrams(found: list[str], n: int) -> list[str]:
    """Runs of n words, joined by a space; none if there are fewer than n words."""
    return [" ".join(found[i : i + n]) for i in range(len(found) - n + 1)]


def lookup_ngrams(text: str, n: int) -> tuple[int, list[str]]:
    """(Length, n-grams) by which an evaluation text is looked up in training text, GPT-3's rule.

    A text of fewer than n words is looked up as a whole, down to LEAST_WORDS, or to LEAST_LETTERS where letters are
    words; below, nothing can be said: no n-grams. Brown et al. 2020, arXiv 2005.14165, appendix C.
    """
    found = words(text)
    length = min(n, len(found))
    least = LEAST_LETTERS if any(map(_UNSPACED_WORD.match, found)) else LEAST_WORDS
    return length, ngrams(found, length) if length >= min(n, least) else []
