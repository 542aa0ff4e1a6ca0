"""Sources of documents: any `datasets.load_dataset` call, JSONL or WARC files, or text of installed packages.

Every kind has an identity (plain values that change when its text may change) and yields documents lazily.
"""

from __future__ import annotations

import codecs
import errno
import glob
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.data.files import DataError, sha256_file
from lm.data.options import check_source_options, text_list
from lm.data.pipeline.stage import StageSpec

SNAPSHOT_OPTIONS = ("snapshot", "snapshot_path")  # a column; a pattern in a file's path
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True)
class Document:
    """One document as read, before any check.

    Attributes:
        text: str, or bytes that should be UTF-8; anything else counts as not text.
        group: documents of one group go to the same split; None: by the text alone.
        url: where it is from, None if the source does not say.
        problem: why there is no document here (a line that is not JSON, say); None: there is one.
        snapshot: the crawl it belongs to, None if the source does not say.
    """

    text: Any
    group: str | None = None
    url: str | None = None
    problem: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True)
class SourceSpec:
    """A named source of a config.

    Attributes:
        name: lower-case letters, digits, - and _; a folder name.
        kind: one of `kinds`.
        licence: of the text, for the manifest and the docs.
        options: settings of the kind.
        stages: between reading and the tokenizer, see lm.data.pipeline.
        language: of all of its documents, for the tokenizer report; None: not declared.
    """

    name: str
    kind: str
    licence: str = "not stated"
    options: dict[str, Any] = field(default_factory=dict)
    stages: tuple[StageSpec, ...] = ()
    language: str | None = None

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise DataError(f"source name '{self.name}' must be of a-z, 0-9, - and _, and start with a letter or digit")


@dataclass(frozen=True)
class Kind:
    """How to read one kind of source.

    Attributes:
        options: names a config may set; required ones first.
        required: how many of them must be set.
        identity: spec -> plain values; changes when the text may change.
        documents: spec -> documents, lazily, always in the same order.
    """

    options: tuple[str, ...]
    required: int
    identity: Callable[[SourceSpec], Any]
    documents: Callable[[SourceSpec], Iterator[Document]]


def kinds() -> dict[str, Kind]:
    """All kinds by name."""
    from lm.data.packaged import PACKAGED_KINDS
    from lm.data.warc import warc_documents, warc_identity

    return {
        "dataset": Kind(
            ("path", "name", "data_files", "data_dir", "split", "revision", "text", "group", "url", "snapshot", "args"),
            1,
            _dataset_identity,
            _dataset_documents,
        ),
        "jsonl": Kind(("data_files", "text", "group", "url", *SNAPSHOT_OPTIONS), 1, files_identity, _jsonl_documents),
        "warc": Kind(("data_files", "snapshot_path"), 1, warc_identity, warc_documents),
        **PACKAGED_KINDS,
    }


def kind_of(spec: SourceSpec) -> Kind:
    """The spec's kind, with its options checked.

    Raises:
        DataError: unknown kind, unknown or missing option, or one of another type.
    """
    known = kinds()
    if spec.kind not in known:
        raise DataError(f"source '{spec.name}' has unknown kind '{spec.kind}'; kinds: {', '.join(known)}")
    kind = known[spec.kind]
    for option in spec.options:
        if option not in kind.options:
            raise DataError(
                f"source '{spec.name}': kind '{spec.kind}' has no option '{option}'; options: {', '.join(kind.options)}"
            )
    check_source_options(spec.name, spec.options)
    for option in kind.options[: kind.required]:
        if not spec.options.get(option):
            raise DataError(f"source '{spec.name}': kind '{spec.kind}' needs option '{option}'")
    return kind


# -- files ------------------------------------------------------------------------------------------------------


def matching_files(spec: SourceSpec) -> list[Path]:
    """Files of the option data_files (a path or glob, or a list of them), sorted within each pattern.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: list[Path] = []
    for pattern in text_list(spec.options["data_files"]) or []:
        matches = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
        if not matches:
            raise DataError(f"source '{spec.name}': no file matches {pattern} (relative to {Path.cwd()})")
        found += [Path(match) for match in matches if Path(match) not in found]
    return found


def files_identity(spec: SourceSpec) -> Any:
    """sha256 of each file, and its snapshot where its path says it."""
    files = matching_files(spec)
    labels = [[snapshot_of(spec, path) for path in files]] if spec.options.get("snapshot_path") else []
    return [*(sha256_file(path) for path in files), *labels]


def snapshot_of(spec: SourceSpec, path: Path) -> str | None:
    """What the pattern of the option snapshot_path matches in a file's path; its first group, if it has one.

    Raises:
        DataError: no regular expression, or a path without a match.
    """
    pattern = spec.options.get("snapshot_path")
    if not pattern:
        return None
    try:
        match = re.search(str(pattern), str(path))
    except re.error as error:
        raise DataError(f"source '{spec.name}': snapshot_path {pattern} is no regular expression ({error})") from None
    if match is None:
        raise DataError(f"source '{spec.name}': snapshot_path {pattern} matches nothing in {path}")
    return match.group(1) if match.re.groups else match.group()


def _jsonl_documents(spec: SourceSpec) -> Iterator[Document]:
    column = text_column(spec)
    missing, good, first = wanted_columns(spec), 0, ""
    for path in matching_files(spec):
        snapshot = snapshot_of(spec, path)
        for number, line in enumerate(_lines(path, spec.name), start=1):
            if not line.strip():
                continue
            try:
                text = line.decode()
            except UnicodeDecodeError:
                yield Document(line)  # counted as not UTF-8 by whoever decodes it
                continue
            row, problem = _jsonl_row(text, column, f"source '{spec.name}': {path} line {number}")
            if problem:
                first = first or problem
                yield Document(None, problem=problem)
                continue
            good += 1
            missing = [name for name in missing if spec.options[name] not in row] if missing else missing
            yield _document(spec, row, column, snapshot)
    if first and not good:  # no line is as the config says: the config or the file is wrong, not a line
        raise DataError(first)
    if missing:
        raise no_column(spec, missing[0])


def _lines(path: Path, source: str) -> Iterator[bytes]:
    """Lines of a plain or gzipped file, split at line feeds only: str.splitlines also splits strings, at U+2028."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file):
                yield line.removeprefix(codecs.BOM_UTF8) if number == 0 else line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"source '{source}': {path} is no whole gzip file ({error}); compress it again") from None


def _document(spec: SourceSpec, row: dict[str, Any], column: str, snapshot: str | None = None) -> Document:
    """A row's document; `snapshot`: of its file, for a row that has none of its own."""
    names = (spec.options.get(option) for option in ("group", "url", "snapshot"))
    group, url, own = (None if name is None or row.get(name) is None else str(row[name]) for name in names)
    return Document(row[column], group, url, snapshot=snapshot if own is None else own)


def text_column(spec: SourceSpec) -> str:
    """Name of the column of text.

    Raises:
        DataError: a name of a column that is no text.
    """
    for option in ("text", "group", "url", "snapshot"):
        value = spec.options.get(option)
        if value is not None and not isinstance(value, str):
            raise DataError(f"source '{spec.name}': option {option} must be the name of a column, got {value!r}")
    return spec.options.get("text") or "text"


def wanted_columns(spec: SourceSpec) -> list[str]:
    """Options that name a column which some row must have: without it, documents of one group would land in both
    splits, or all snapshots be one, unnoticed."""
    return [option for option in ("group", "snapshot") if spec.options.get(option) is not None]


def no_column(spec: SourceSpec, option: str) -> DataError:
    """The error of a column that no row has."""
    column = spec.options[option]
    return DataError(f"source '{spec.name}': no row has the column '{column}'; mend or remove the option {option}")


def _jsonl_row(line: str, column: str, where: str) -> tuple[dict[str, Any], str]:
    """(row, "") of a line, or ({}, what is wrong with it)."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return {}, f"{where} is not JSON ({error.msg}); mend or remove the line"
    except ValueError as error:  # JSON, but Python refuses numbers of thousands of digits
        return {}, f"{where} cannot be read ({' '.join(str(error).split(';')[0].split())}); mend or remove the line"
    except RecursionError:
        return {}, f"{where} is nested too deeply; mend or remove the line"
    if not isinstance(row, dict) or column not in row:
        columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        return {}, f"{where} has no column '{column}' (it has: {columns}); set the option text"
    return row, ""


# -- datasets ---------------------------------------------------------------------------------------------------

_BUILDERS = ("json", "parquet", "text", "csv", "arrow")


def _dataset_identity(spec: SourceSpec) -> Any:
    local = spec.options["path"] in _BUILDERS and isinstance(spec.options.get("data_files"), str | list)
    return [sha256_file(path) for path in matching_files(spec)] if local else None


def _dataset_documents(spec: SourceSpec) -> Iterator[Document]:
    import datasets

    options = dict(spec.options)
    column = text_column(spec)
    options = {key: value for key, value in options.items() if key not in ("text", "group", "url", "snapshot")}
    split = options.pop("split", "train")
    arguments = {**options.pop("args", {}), **options}
    path = arguments.pop("path")
    if path in _BUILDERS and isinstance(arguments.get("data_files"), str | list):
        arguments["data_files"] = [str(file) for file in matching_files(spec)]
    try:
        rows = datasets.load_dataset(path, split=split, streaming=True, **arguments)
        for row in rows:
            if column not in row:
                raise DataError(
                    f"source '{spec.name}' has no column '{column}' (it has: {', '.join(row)}); set the option text"
                )
            for option in wanted_columns(spec):
                if spec.options[option] not in row:
                    raise no_column(spec, option)
            yield _document(spec, row, column)
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        hint = "; kind: jsonl reads on past text that is not UTF-8" if path == "json" else ""
        line = (str(error).splitlines() or [""])[0]
        what = f"{type(error).__name__}: {line}{hint}"
        raise DataError(f"source '{spec.name}': datasets could not read {path}: {what}") from error
