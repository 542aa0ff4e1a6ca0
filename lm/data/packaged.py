"""Sources made of text that ships inside installed packages: nothing is downloaded when data is prepared."""

from __future__ import annotations

import gzip
import html
import importlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lm.data.files import DataError
from lm.data.options import text_list
from lm.data.sources import Document, Kind, SourceSpec

# Part of each identity: raise it when the text that is taken from a package changes.
EXTRACTION_VERSION = 1


def installed_version(requirement: str, source: str) -> tuple[str, str]:
    """(name, version) of an installed distribution, given as `name` or pinned as `name==version`.

    Raises:
        DataError: it is missing or of another version.
    """
    name, _, pinned = requirement.partition("==")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"source '{source}' needs package {requirement}; run: pip install '{requirement}'") from None
    if pinned and pinned != version:
        raise DataError(
            f"source '{source}' is pinned to {requirement} but {version} is installed;"
            f" run: pip install '{requirement}' or change the pin in the config"
        )
    return name, version


def _versions(spec: SourceSpec) -> Any:
    packages = text_list(spec.options["packages"]) or []
    return [EXTRACTION_VERSION, *(list(installed_version(name, spec.name)) for name in packages)]


# -- Bible translations -----------------------------------------------------------------------------------------


def _bible_documents(spec: SourceSpec) -> Iterator[Document]:
    """One chapter a document. The group is book and chapter, so all translations hold out the same chapters."""
    for requirement in text_list(spec.options["packages"]) or []:
        name, _ = installed_version(requirement, spec.name)
        module = importlib.import_module(f"{name.replace('-', '_')}.plain_text_readers_bible")
        bible = module.bible
        titles = {book.value: title for book, title in bible.short_titles.items()}
        chapters: dict[int, list[str]] = {}
        for verse_id, start in bible.verse_start_indices.items():
            verse = bible.scripture_content[start : bible.verse_end_indices[verse_id]]
            chapters.setdefault(verse_id // 1000, []).append(verse)
        for chapter_id, verses in chapters.items():
            book, chapter = divmod(chapter_id, 1000)
            title = f"{titles.get(book, f'Book {book}')} {chapter}"
            yield Document(f"{title}\n\n{_prose(''.join(verses))}\n", group=f"{book}:{chapter}")


def _prose(text: str) -> str:
    """Plain prose: no brackets around supplied words, one kind of apostrophe, single spaces."""
    text = text.replace("`", "'").replace("\u2019", "'").translate({ord(c): None for c in "[]{}*"})
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


# -- botocore's service descriptions -----------------------------------------------------------------------------

MIN_REFERENCE_CHARACTERS = 200
MAX_REFERENCE_CHARACTERS = 5000

_BLOCK = re.compile(r"</?(?:p|ul|ol|dl|dt|dd|note|important|div|table|tr|h\d|pre|br|title|fullname)\b[^>]*>", re.I)
_ITEM = re.compile(r"<li\b[^>]*>", re.I)
_TAG = re.compile(r"</?[a-zA-Z][^>]*>|<!--.*?-->", re.S)
_VERB = re.compile(r"^(?:Batch)?[A-Z][a-z]+(?=[A-Z])")


def html_to_text(markup: str) -> str:
    """Text of a documentation string: paragraphs as lines, list items behind '- ', entities resolved, no tags."""
    text = _TAG.sub("", _ITEM.sub("\n- ", _BLOCK.sub("\n", re.sub(r"\s+", " ", markup))))
    lines = (re.sub(r"[^\S\n]+", " ", line).strip() for line in html.unescape(text).split("\n"))
    return re.sub(r"(?m)^-\n(?=\S)", "- ", "\n".join(line for line in lines if line))


def _botocore_documents(spec: SourceSpec) -> Iterator[Document]:
    """One operation a document: what it does, then its parameters; long ones in parts of whole lines.

    The group is the service and the operation's object, so CreateBucket and ListBuckets, which share sentences, go to
    the same split.
    """
    import botocore

    root = Path(botocore.__file__).parent / "data"
    wanted = text_list(spec.options.get("services"))
    services = sorted(path.name for path in root.iterdir() if path.is_dir())
    for service in services if wanted is None else wanted:
        versions = sorted((root / service).glob("*/service-2.json.gz"))
        if not versions:
            raise DataError(f"source '{spec.name}': botocore has no service '{service}'")
        description = json.loads(gzip.decompress(versions[-1].read_bytes()))
        for name in sorted(description.get("operations", {})):
            noun = _VERB.sub("", name).removesuffix("s")
            for part in _split_lines(_operation_page(description, name)):
                yield Document(part, group=f"{service}:{noun}")


def _operation_page(description: Mapping[str, Any], name: str) -> str:
    operation = description["operations"][name]
    lines = [f"{description['metadata']['serviceFullName']}: {name}"]
    lines.append(html_to_text(operation.get("documentation") or ""))
    shape = description["shapes"].get(operation.get("input", {}).get("shape"), {})
    for member, body in shape.get("members", {}).items():
        text = html_to_text(body.get("documentation") or "")
        if text:
            lines.append(f"{member}: {text}")
    return "\n".join(line for line in lines if line) + "\n"


def _split_lines(page: str) -> Iterator[str]:
    """Parts of at most 5,000 characters, cut between lines; parts under 200 characters are left out."""
    part = ""
    for line in page.splitlines(keepends=True):
        if part and len(part) + len(line) > MAX_REFERENCE_CHARACTERS:
            if len(part) >= MIN_REFERENCE_CHARACTERS:
                yield part
            part = ""
        part += line
    if len(part) >= MIN_REFERENCE_CHARACTERS:
        yield part


# -- Python files ------------------------------------------------------------------------------------------------


def _python_documents(spec: SourceSpec) -> Iterator[Document]:
    """One .py file of the named packages a document, as bytes; `exclude` has globs of paths to leave out."""
    exclude = text_list(spec.options.get("exclude")) or []
    for requirement in text_list(spec.options["packages"]) or []:
        name, _ = installed_version(requirement, spec.name)
        files = importlib.metadata.files(name) or []
        paths = sorted(str(file) for file in files if file.suffix == ".py")
        for path in paths:
            located = Path(str(importlib.metadata.distribution(name).locate_file(path)))
            if not any(fnmatch(path, pattern) for pattern in exclude) and located.is_file():
                yield Document(located.read_bytes())


def _botocore_identity(spec: SourceSpec) -> Any:
    return [EXTRACTION_VERSION, list(installed_version("botocore", spec.name))]


PACKAGED_KINDS = {
    "bible": Kind(("packages",), 1, _versions, _bible_documents),
    "botocore": Kind(("services",), 0, _botocore_identity, _botocore_documents),
    "python": Kind(("packages", "exclude"), 1, _versions, _python_documents),
}
