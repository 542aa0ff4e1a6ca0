"""A source's stages, one after the other, each kept on disk under the hash of what decides its outcome.

CACHE/<source>/<number>-<kind>-<key>/   report.json (written last), and either a store of documents, where the stage
may change texts, or `kept`, the positions in the last store of the documents that stay.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.documents import Report, utf8_of
from lm.data.executor import Executor, Serial
from lm.data.files import DataError, read_json, sha256_json, write_bytes, write_json
from lm.data.pipeline.kinds import stage_kind
from lm.data.pipeline.parts import stage_outcomes
from lm.data.pipeline.report import StageReport
from lm.data.pipeline.stage import Dropped, Kept, Outcome, package_version
from lm.data.pipeline.store import KEPT, TEXT, Documents, Item, StoreWriter
from lm.data.sources import Document, SourceSpec, kind_of

READ_VERSION = 1
_PARSERS = {"warc": "warcio", "dataset": "datasets"}  # their versions decide what is read


class Pipeline:
    """The stages of one source.

    Attributes:
        names: folder of each step in the cache, reading first; known before anything runs.
    """

    def __init__(
        self,
        spec: SourceSpec,
        cache: Path,
        log: Callable[[str], None] = lambda line: None,
        executor: Executor | None = None,
    ) -> None:
        self.spec, self.folder, self.log, self.executor = spec, cache / spec.name, log, executor or Serial()
        self.raw = bool(spec.stages) and spec.stages[0].kind == "extract"
        self.stages = [stage_kind(stage, f"source '{spec.name}'") for stage in spec.stages]
        parser = package_version(_PARSERS[spec.kind]) if spec.kind in _PARSERS else None
        key = sha256_json([READ_VERSION, self.raw, spec.kind, spec.options, kind_of(spec).identity(spec), parser])
        self.names = [f"00-read-{key[:16]}"]
        for number, (stage, (kind, options)) in enumerate(zip(spec.stages, self.stages, strict=True), start=1):
            key = sha256_json([key, stage.kind, kind.key(options)])
            self.names.append(f"{number:02}-{stage.kind}-{key[:16]}")

    def run(self) -> tuple[Documents, list[dict[str, Any]]]:
        """Documents that are left and the report of each step; steps that were done before are not done again."""
        documents, report = self._read()
        reports = [report]
        for number in range(1, len(self.names)):
            documents, report = self._stage(number, documents)
            reports.append(report)
        return documents, reports

    def prune(self) -> None:
        """Remove what other configs left in the cache."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in self.names:
                shutil.rmtree(path, ignore_errors=True)

    def _found(self, name: str, before: Documents | None) -> tuple[Documents, dict[str, Any]] | None:
        """A step that was done before and is whole."""
        folder = self.folder / name
        try:
            report = read_json(folder / "report.json")
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
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _read(self) -> tuple[Documents, dict[str, Any]]:
        if found := self._found(self.names[0], None):
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
        name, (kind, options) = self.names[number], self.stages[number - 1]
        if found := self._found(name, before):
            return found
        folder, report = self._fresh(name), StageReport(self.spec.stages[number - 1].kind)
        outcomes = _checked(stage_outcomes(report.stage, before, options), before, report)
        if kind.changes:
            writer = StoreWriter(folder)
            for _, item in outcomes:
                writer.add(item)
            writer.close()
            return self._finish(folder, report, self._documents(folder))
        kept = array("q", (position for position, _ in outcomes))
        positions = np.array(kept, dtype="<i8")
        positions = positions if before.positions is None else before.positions[positions]
        write_bytes(folder / KEPT, positions.tobytes())
        return self._finish(folder, report, self._documents(before.base, positions))

    def _finish(self, folder: Path, report: StageReport, documents: Documents) -> tuple[Documents, dict[str, Any]]:
        plain = report.plain()
        write_json(folder / "report.json", plain)
        before, after = plain["documents_in"], plain["documents_out"]
        size = plain["bytes_out"] / 1e6
        self.log(f"{self.spec.name}: {plain['stage']}: {after:,} of {before:,} documents kept, {size:,.1f} MB")
        return documents, plain


def _checked(outcomes: Iterator[Outcome], before: Documents, report: StageReport) -> Iterator[tuple[int, Item]]:
    """(position in the input, document) of what stays, counted on the way."""
    for position, (item, outcome) in enumerate(zip(before, outcomes, strict=True)):
        report.count(item, outcome)
        if isinstance(outcome, Kept):
            yield position, item if outcome.text is None else Item(outcome.text, item.url, item.group)


def _accepted(document: Document, raw: bool) -> tuple[Item, Outcome]:
    """A document as bytes, and whether it can be text."""
    text = document.text.encode("utf-8", "surrogatepass") if isinstance(document.text, str) else document.text
    item = Item(text if isinstance(text, bytes) else b"", document.url, document.group)
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
