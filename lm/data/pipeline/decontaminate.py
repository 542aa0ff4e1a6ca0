"""Decontamination: documents that share word 13-grams with evaluation texts given as files (GPT-3's rule).

Words and the rule for short texts: lm.data.words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.data.files import DataError, sha256_file
from lm.data.pipeline.stage import (
    REQUIRED,
    DocumentRule,
    Dropped,
    Kept,
    Outcome,
    PerDocument,
    Range,
    StageKind,
    files_option,
)
from lm.data.pipeline.store import Item
from lm.data.words import LEAST_WORDS, lookup_ngrams, ngrams, words


def _files(options: dict[str, Any]) -> list[Path]:
    return files_option("decontaminate", options, "files")


def evaluation_texts(path: Path) -> Iterator[str]:
    """Texts of a file: all strings of each row of JSONL, else each line.

    Raises:
        DataError: the file is not UTF-8 or a row is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise DataError(f"stage decontaminate: {path} is not UTF-8") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            yield from strings(json.loads(line))
        except (ValueError, RecursionError) as error:
            what = f"{path} line {number} is not JSON that can be read ({str(error).split(';')[0]})"
            raise DataError(f"stage decontaminate: {what}; mend or remove the line") from None


def strings(value: Any) -> Iterator[str]:
    """All strings within a plain value, keys aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


def evaluation_ngrams(files: list[Path], n: int) -> dict[int, dict[str, str]]:
    """Word count -> n-gram -> file it is from."""
    wanted: dict[int, dict[str, str]] = {}
    for path in files:
        for text in evaluation_texts(path):
            length, grams = lookup_ngrams(text, n)
            for gram in grams:
                wanted.setdefault(length, {}).setdefault(gram, path.name)
    if not wanted:
        raise DataError(
            f"stage decontaminate: its files hold no text of at least {LEAST_WORDS} words; mend the option files or"
            " remove the stage"
        )
    return wanted


def decontaminate(options: dict[str, Any]) -> DocumentRule:
    """Drop (or flag, and keep) documents that share an n-gram with an evaluation text."""
    n, least, drop = options["ngram"], options["min_ngrams"], options["action"] == "drop"
    wanted = evaluation_ngrams(_files(options), n)

    def rule(item: Item) -> Outcome:
        found = words(item.string)
        hits = [
            (gram, table[gram]) for length, table in wanted.items() for gram in ngrams(found, length) if gram in table
        ]
        if len(hits) < least:
            return Kept()
        gram, name = hits[0]
        reason, detail = f"overlap with {name}", f"{len(hits)} n-grams, the first: {gram}"
        return Dropped(reason, detail) if drop else Kept(notes={reason: 1}, detail=detail)

    return rule


KINDS = {
    "decontaminate": StageKind(
        PerDocument(decontaminate),
        {"files": REQUIRED, "ngram": 13, "min_ngrams": 1, "action": "drop"},
        {"ngram": Range(LEAST_WORDS, 1000, True), "min_ngrams": Range(1, 1e9, True), "action": ("drop", "flag")},
        identity=lambda options: [[path.name, sha256_file(path)] for path in _files(options)],
        version=2,
    )
}
