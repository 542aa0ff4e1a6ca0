"""A page as it was served, as text: by its bytes if they are UTF-8, else by the charset that it says it has."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress

_HEADER = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_IN_PAGE = re.compile(rb"<(?:meta|\?xml)[^>]{0,200}?(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_LOOKED_AT = 1024  # bytes at a page's beginning that may name its charset, as the HTML standard has it
# What browsers take these names for: supersets, by the names that Python knows them under.
_MEANT = {
    "iso8859-1": "cp1252",
    "ascii": "cp1252",
    "iso8859-9": "cp1254",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
_NO_CHARSETS = ("idna", "punycode", "unicode_escape", "raw_unicode_escape", "utf-7", "undefined", "mbcs", "oem")
_GOOD_A_BAD = 4


def served_text(body: bytes, content_type: str) -> str | bytes:
    """The text of a body; the body itself if it is UTF-8, or if nothing says what it is.

    A few bytes that are none in text that is UTF-8 otherwise (a page that was cut off, say) become U+FFFD: read by
    another charset, all its letters beyond ASCII would come out wrong.

    Args:
        content_type: of the answer; its charset counts before the one that the page names.
    """
    if b"\0" not in body:
        text = body.decode("utf-8", "replace")
        bad = text.count("\ufffd")
        if bad == 0 or len(text) - len(text.encode("ascii", "ignore")) - bad >= _GOOD_A_BAD * bad:
            return text if bad else body
    names = _HEADER.findall(content_type) + [name.decode() for name in _IN_PAGE.findall(body[:_LOOKED_AT])]
    for name in names:
        with suppress(LookupError, UnicodeError):
            known = codecs.lookup(name).name
            if known not in _NO_CHARSETS:
                return body.decode(_MEANT.get(known, known))
    return body
