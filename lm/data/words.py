"""The word rule of everything that compares texts: near-duplicates, decontamination, contamination of evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterator

LEAST_WORDS = 5  # of a text that may be looked up

# Vowel signs and points are marks, which \w leaves out: without them every Telugu or Hindi word falls into letters.
MARKS = r"\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0963\u0966-\u0dff"
MARKS += r"\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1-\u0ebc\u0ec8-\u0ecd\u102b-\u103e\u17b4-\u17d3"
_WORD = re.compile(rf"[^\W_]+(?:[{MARKS}]+[^\W_]*)*")
_ASCII_WORD = re.compile(r"[a-z0-9]+")  # the same for such text, at half the time


def words(text: str) -> list[str]:
    """Runs of letters (with their marks) and digits, lower case."""
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text.lower())


def each_word(text: str) -> Iterator[str]:
    """As `words`, one at a time: of a text of 100 MB the list of its words takes 1 GB."""
    return (match.group() for match in (_ASCII_WORD if text.isascii() else _WORD).finditer(text.lower()))


def ngrams(found: list[str], n: int) -> list[str]:
    """Runs of n words, joined by a space; none if there are fewer than n words."""
    return [" ".join(found[i : i + n]) for i in range(len(found) - n + 1)]


def lookup_ngrams(text: str, n: int) -> tuple[int, list[str]]:
    """(Length, n-grams) by which an evaluation text is looked up in training text, GPT-3's rule.

    A text of fewer than n words is looked up as a whole, down to LEAST_WORDS; below, nothing can be said: no n-grams.
    Brown et al. 2020, arXiv 2005.14165, appendix C.
    """
    found = words(text)
    length = min(n, len(found))
    return length, ngrams(found, length) if length >= LEAST_WORDS else []
