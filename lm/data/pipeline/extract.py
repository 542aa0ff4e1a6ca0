"""Main text of a saved page by trafilatura (Barbaresi 2021), without navigation, comments and scripts."""

from __future__ import annotations

import logging
import re
from typing import Any

from lm.data.files import DataError
from lm.data.pipeline.stage import DocumentRule, Dropped, Kept, Outcome, PerDocument, Range, StageKind
from lm.data.pipeline.store import Item

_TAGS = b"html|head|body|title|meta|div|span|p|br|table|article|section|h[1-6]|ul|ol|li|pre|a"
_MARKUP = re.compile(rb"<(?:!doctype|/?(?:" + _TAGS + rb")[\s>/])", re.IGNORECASE)


def is_plain(page: bytes) -> bool:
    """Whether a page was served as text: UTF-8 without a tag of HTML. trafilatura would find nothing in it."""
    try:
        return b"\0" not in page and not _MARKUP.search(page) and bool(page.decode())
    except UnicodeDecodeError:
        return False


def extract(options: dict[str, Any]) -> DocumentRule:
    """HTML as it was served -> text, its encoding found by trafilatura; plain text stays. Must be the first stage."""
    try:
        import trafilatura
    except ImportError:
        raise DataError("stage extract needs trafilatura; install it: pip install 'scalewright[data]'") from None
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    most = options["max_bytes"]
    settings = {name: bool(options[name]) for name in ("favor_precision", "include_tables", "include_comments")}

    def rule(item: Item) -> Outcome:
        if len(item.text) > most:
            return Dropped("page too large", f"{len(item.text):,} bytes")
        if is_plain(item.text):
            return Kept()
        try:
            text = trafilatura.extract(item.text, url=item.url, **settings)
        except Exception as error:  # a parser that fails on one page of a crawl must not end it
            return Dropped("extraction failed", f"{type(error).__name__}: {error}"[:200])
        if not text or not text.strip():
            return Dropped("no main text")
        return Kept(text.encode("utf-8", "replace"))

    return rule


KINDS = {
    "extract": StageKind(
        PerDocument(extract),
        {"favor_precision": True, "include_tables": True, "include_comments": False, "max_bytes": 20_000_000},
        {"max_bytes": Range(1, 1e12)},
        changes=True,
        packages=("trafilatura",),
        version=2,
    )
}
