"""Main text of a saved page by trafilatura (Barbaresi 2021), without navigation, comments and scripts."""

from __future__ import annotations

import logging
import re
from typing import Any

from lm.data.files import DataError
from lm.data.pipeline.stage import DocumentRule, Dropped, Kept, Outcome, PerDocument, Range, StageKind
from lm.data.pipeline.store import Item

_TAGS = "html|head|body|title|meta|div|span|p|br|table|article|section|h[1-6]|ul|ol|li|pre|a"
_MARKUP = re.compile(rf"<(?:!doctype|/?(?:{_TAGS})[\s>/])", re.IGNORECASE)
_NO_TEXT = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\ufffd]")  # in what was guessed to be text: it is something else


def is_plain(page: str, guessed: bool) -> bool:
    """Whether a page was served as text: without a tag of HTML. trafilatura would find nothing in it.

    Args:
        guessed: the charset is a guess.
    """
    if not page or page.isspace() or "\0" in page or (guessed and _NO_TEXT.search(page)):
        return False
    return not _MARKUP.search(page)


def extract(options: dict[str, Any]) -> DocumentRule:
    """HTML as it was served -> text; plain text stays. Must be the first stage.

    The charset of bytes that are not UTF-8 (nothing that was served said which it is) is guessed by trafilatura.
    """
    try:
        import trafilatura
        from trafilatura.utils import decode_file
    except ImportError:
        raise DataError("stage extract needs trafilatura; install it: pip install 'scalewright[data]'") from None
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    most = options["max_bytes"]
    settings = {name: bool(options[name]) for name in ("favor_precision", "include_tables", "include_comments")}

    def rule(item: Item) -> Outcome:
        if len(item.text) > most:
            return Dropped("page too large", f"{len(item.text):,} bytes")
        guessed = not _is_utf8(item.text)
        try:
            page = decode_file(item.text)
            if is_plain(page, guessed):
                return Kept(page.encode()) if guessed else Kept()
            text = trafilatura.extract(page, url=item.url, **settings)
        except Exception as error:  # a parser that fails on one page of a crawl must not end it
            return Dropped("extraction failed", f"{type(error).__name__}: {error}"[:200])
        if not text or not text.strip():
            return Dropped("no main text")
        return Kept(text.encode("utf-8", "replace"))

    return rule


def _is_utf8(page: bytes) -> bool:
    try:
        page.decode()
    except UnicodeDecodeError:
        return False
    return True


KINDS = {
    "extract": StageKind(
        PerDocument(extract),
        {"favor_precision": True, "include_tables": True, "include_comments": False, "max_bytes": 20_000_000},
        {"max_bytes": Range(1, 1e12)},
        changes=True,
        packages=("trafilatura",),
        version=3,
    )
}
