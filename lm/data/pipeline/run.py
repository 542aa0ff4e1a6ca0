"""A source's stages, one after the other, each kept on disk under the hash of what decides its outcome.

CACHE/<source>/<number>-<kind>-<key>/   report.json (written last), and either a store of documents, where the stage
may change texts, or `kept`, the positions in the last store of the documents that stay.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.documents import Report, utf8_of
from lm.data.executor import Executor, Serial
from lm.data.files import DataError, discard, read_json, sha256_json, write_bytes, write_json
from lm.data.pipeline.kinds import stage_key, stage_kind
from lm.data.pipeline.report import StageReport
from lm.data.pipeline.scope import outcomes as scoped_outcomes
from lm.data.pipeline.stage import Dropped, Kept, Outcome, package_version
from lm.data.pipeline.store import KEPT, TEXT, Documents, Item, StoreWriter
from lm.data.sources import Document, SourceSpec, kind_of

READ_VERSION = 1
REPORT = "report.json"  # of a step, written last
_PARSERS = {"warc": "warcio", "dataset": "datasets"}  # their versions decide what is read


class Pipeline:
    """The stages of one source.

    Attributes:
        names: folder of each step in the cache, reading first; known before anything runs.
        key: of what decides the documents that are left.
    """

    def __init__(
        self,
        spec: SourceSpec,
        cache: Path,
        log: Callable[[str], None] = lambda line: None,
        executor: Executor | None = None,
    ) -> None:
        self.spec, self.cache, self.folder, self.log = spec, cache, cache / spec.name, log
        self.executor = executor or Serial()
        self.raw = bool(spec.stages) and spec.stages[0].kind == "extract"
        self.stages = [stage_kind(stage, f"source '{spec.name}'") for stage in spec.stages]
        parser = package_version(_PARSERS[spec.kind]) if spec.kind in _PARSERS else None
        key = sha256_json([READ_VERSION, self.raw, spec.kind, spec.options, kind_of(spec).identity(spec), parser])
        self.names = [f"00-read-{key[:16]}"]
        for number, (stage, (kind, options)) in enumerate(zip(spec.stages, self.stages, strict=True), start=1):
            key = sha256_json([key, *stage_key(stage, kind, options)])
            self.names.append(f"{number:02}-{stage.kind}-{key[:16]}")
        self.key = key

    def run(self) -> tuple[Documents, list[dict[str, Any]]]:
        """Documents that are left and the report of each step; steps that were done before are not done again."""
        documents, report = self._read()
        reports = [report]
        for number in range(1, len(self.names)):
            documents, report = self._stage(number, documents)
            reports.append(report)
        return documents, reports

    def prune(self, shared: Iterable[str] = ()) -> None:
        """Remove what other configs left in the cache; `shared`: folders of stages over all sources, which stay."""
        kept = {*self.names, *shared}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in kept:
                discard(path, REPORT)

    def found(self, name: str, before: Documents | None) -> tuple[Documents, dict[str, Any]] | None:
        """A step that was done before and is whole."""
        folder = self.folder / name
        try:
            report = read_json(folder / REPORT)
            if (folder / TEXT).is_file():
                documents = self._documents(folder)
                whole = int(documents.sizes().sum()) == (folder / TEXT).stat().st_size
            elif before is None:
                return None
            else:
                documents = self._documents(before.base, np.fromfile(folder / KEPT, dtype="<i8"))
                whole = True
        except (DataError, OSError):
            return None
        return (documents, report) if whole and len(documents) == report["documents_out"] else None

    def _documents(self, base: Path, positions: NDArray[np.int64] | None = None) -> Documents:
        return Documents(base, positions, self.executor)

    def _fresh(self, name: str) -> Path:
        folder = self.folder / name
        discard(folder, REPORT)
        folder.mkdir(parents=True)
        return folder

    def _read(self) -> tuple[Documents, dict[str, Any]]:
        if found := self.found(self.names[0], None):
            return found
        folder = self._fresh(self.names[0])
        report, writer = StageReport("read"), StoreWriter(folder)
        for document in kind_of(self.spec).documents(self.spec):
            item, outcome = _accepted(document, self.raw)
            report.count(item, outcome)
            if isinstance(outcome, Kept):
                writer.add(item)
        writer.close()
        return self._finish(folder, report, self._documents(folder))

    def _stage(self, number: int, before: Documents) -> tuple[Documents, dict[str, Any]]:
        name, spec, (kind, options) = self.names[number], self.spec.stages[number - 1], self.stages[number - 1]
        if found := self.found(name, before):
            return found
        title = f"{spec.kind} (per {spec.scope})" if spec.scope else spec.kind
        options = kind.ready(options, self.cache, self.log)
        return self.write(name, title, kind.changes, scoped_outcomes(spec.kind, options, spec.scope, [before]), before)

    def write(
        self, name: str, title: str, changes: bool, outcomes: Iterator[Outcome], before: Documents
    ) -> tuple[Documents, dict[str, Any]]:
        """Do a step, one outcome a document of `before`: what is left, written to the folder `name`, and the report."""
        folder, report = self._fresh(name), StageReport(title)
        checked = _checked(outcomes, before, report)
        if changes:
            writer = StoreWriter(folder)
            for _, item in checked:
                writer.add(item)
            writer.close()
            return self._finish(folder, report, self._documents(folder))
        kept = array("q", (position for position, _ in checked))
        positions = np.array(kept, dtype="<i8")
        positions = positions if before.positions is None else before.positions[positions]
        write_bytes(folder / KEPT, positions.tobytes())
        return self._finish(folder, report, self._documents(before.base, positions))

    def _finish(self, folder: Path, report: StageReport, documents: Documents) -> tuple[Documents, dict[str, Any]]:
        plain = report.plain()
        write_json(folder / REPORT, plain)
        before, after = plain["documents_in"], plain["documents_out"]
        size = plain["bytes_out"] / 1e6
        self.log(f"{self.spec.name}: {plain['stage']}: {after:,} of {before:,} documents kept, {size:,.1f} MB")
        return documents, plain


def _checked(outcomes: Iterator[Outcome], before: Documents, report: StageReport) -> Iterator[tuple[int, Item]]:
    """(position in the input, document) of what stays, counted on the way."""
    for position, (item, outcome) in enumerate(zip(before, outcomes, strict=True)):
        report.count(item, outcome)
        if isinstance(outcome, Kept):
            yield position, item if outcome.text is None else replace(item, text=outcome.text)


def _accepted(document: Document, raw: bool) -> tuple[Item, Outcome]:
    """A document as bytes, and whether it can be text."""
    text = document.text.encode("utf-8", "surrogatepass") if isinstance(document.text, str) else document.text
    item = Item(text if isinstance(text, bytes) else b"", document.url, document.group, document.snapshot)
    if document.problem:
        return item, Dropped("malformed", document.problem)
    if raw and isinstance(text, bytes) and text.strip():
        return item, Kept()
    why = Report()
    if utf8_of(document.text, why) is not None:
        return item, Kept()
    names = {"not text": why.not_text, "not UTF-8": why.invalid_unicode, "empty": why.empty}
    return item, Dropped(next(name for name, count in names.items() if count))


def documents_of(documents: Documents) -> Iterator[Document]:
    """What is left, as a source gives it."""
    for item in documents:
        yield Document(item.text, item.group, item.url)
