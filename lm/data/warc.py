"""Pages of a crawl from WARC files, plain or gzipped; stage `extract` makes text of their HTML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lm.data.charset import served_text
from lm.data.files import DataError

if TYPE_CHECKING:
    from lm.data.sources import Document, SourceSpec

_PAGES = ("text/html", "application/xhtml+xml", "text/plain")
_VERSION = 2  # raise it when other text comes of the same files


def warc_identity(spec: SourceSpec) -> Any:
    """The files, and how they are read."""
    from lm.data.sources import files_identity

    return [_VERSION, *files_identity(spec)]


def warc_documents(spec: SourceSpec) -> Iterator[Document]:
    """Bodies of responses with status 200 that say they are pages; a file that is torn counts as one malformed line.

    Raises:
        DataError: warcio is missing, or no file matches.
    """
    from lm.data.sources import Document, matching_files, snapshot_of

    try:
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ImportError:
        raise DataError(f"source '{spec.name}' needs warcio; install it: pip install 'scalewright[data]'") from None
    for path in matching_files(spec):
        snapshot = snapshot_of(spec, path)
        with path.open("rb") as file:
            try:
                for record in ArchiveIterator(file):
                    headers = record.http_headers
                    if record.rec_type != "response" or headers is None or headers.get_statuscode() != "200":
                        continue
                    kind = headers.get_header("Content-Type") or ""
                    if kind.split(";")[0].strip().lower() in _PAGES:
                        url = record.rec_headers.get_header("WARC-Target-URI")
                        page = served_text(record.content_stream().read(), kind)
                        yield Document(page, url=url, snapshot=snapshot)
            except (ArchiveLoadFailed, EOFError, OSError, ValueError) as error:
                problem = f"source '{spec.name}': {path} cannot be read on ({type(error).__name__}: {error})"
                yield Document(None, problem=" ".join(problem.split())[:300])
