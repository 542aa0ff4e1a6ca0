"""Word lists and URL blocklists, from files that the config names: one entry a line, # starts a comment."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
    list_option,
)
from lm.data.pipeline.store import Item
from lm.data.words import words


def entries(kind: str, options: dict[str, Any]) -> list[str]:
    """Entries of the files of the option `files`, lower case.

    Raises:
        DataError: a file is missing, is not UTF-8, or holds nothing.
    """
    found = []
    for name in list_option(kind, options, "files"):
        try:
            lines = Path(name).read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:  # not UTF-8, or no name of a file
            raise DataError(f"stage {kind}: cannot read {name} ({type(error).__name__}); it must be UTF-8") from None
        kept = [line.split("#")[0].strip().lower() for line in lines]
        found += [line for line in kept if line]
    if not found:
        raise DataError(f"stage {kind}: its files hold no entry; mend the option files or remove the stage")
    return found


def file_hashes(options: dict[str, Any]) -> list[str]:
    """sha256 of each of the option's files, missing ones as such (`entries` complains)."""
    files = list_option("of files", options, "files")
    return [sha256_file(Path(name)) if Path(name).is_file() else "missing" for name in files]


def blocked_words(options: dict[str, Any]) -> DocumentRule:
    """Drop a document with more than `max_count` words or phrases of the list, or more than `max_fraction` of words.

    The one that is not set is no limit; with neither, one word is too many.
    """
    kind = "blocked_words"
    count, fraction = options["max_count"], options["max_fraction"]
    most = math.inf if count is None else count
    share = float(count is not None) if fraction is None else fraction
    # As words, not as letters: a short word of the list is part of many harmless ones.
    phrases = sorted(
        {" ".join(words(entry)) for entry in entries(kind, options)} - {""}, key=lambda one: (-len(one), one)
    )
    pattern = re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, phrases))})(?!\S)")

    def rule(item: Item) -> Outcome:
        found = words(item.string)
        hits = pattern.findall(" ".join(found))
        if len(hits) > most or len(hits) > share * max(1, len(found)):
            return Dropped(
                "words of the list", f"{len(hits)} of {len(found)} words: {', '.join(sorted(set(hits))[:5])}"
            )
        return Kept()

    return rule


def blocked_urls(options: dict[str, Any]) -> DocumentRule:
    """Drop a document by its address: a domain of the list with all below it, or a part of an address (with a /)."""
    listed = [re.sub(r"^(https?://)?(www\.)?", "", entry) for entry in entries("blocked_urls", options)]
    domains = {entry for entry in listed if "/" not in entry}  # https://example.com is one too
    prefixes = tuple(entry for entry in listed if "/" in entry)
    missing = options["missing"]

    def rule(item: Item) -> Outcome:
        if not item.url:
            return Dropped("no address") if missing == "drop" else Kept()
        try:
            parts = urlsplit(item.url if "//" in item.url else f"//{item.url}")
            host = (parts.hostname or "").removeprefix("www.")
        except ValueError:
            return Dropped("no valid address", item.url)
        labels = host.split(".")
        for start in range(len(labels)):
            if ".".join(labels[start:]) in domains:
                return Dropped("domain of the list", item.url)
        if prefixes and f"{host}{parts.path or '/'}".lower().startswith(prefixes):
            return Dropped("address of the list", item.url)
        return Kept()

    return rule


KINDS = {
    "blocked_words": StageKind(
        PerDocument(blocked_words),
        {"files": REQUIRED, "max_count": None, "max_fraction": None},
        {"max_count": Range(0, 1e9, off=True), "max_fraction": Range(0, 1, off=True)},
        identity=file_hashes,
        version=3,
    ),
    "blocked_urls": StageKind(
        PerDocument(blocked_urls),
        {"files": REQUIRED, "missing": "keep"},
        {"missing": ("keep", "drop")},
        identity=file_hashes,
        version=2,
    ),
}
