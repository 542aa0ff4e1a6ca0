"""Sources of documents: any `datasets.load_dataset` call, JSONL files, or text that ships in installed packages.

Every kind has an identity (plain values that change when its text may change) and yields documents lazily.
"""

from __future__ import annotations

import errno
import glob
import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.data.files import DataError, sha256_file

NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True)
class Document:
    """One document as read, before any check.

    Attributes:
        text: str, or bytes that should be UTF-8; anything else counts as not text.
        group: documents of one group go to the same split; None: by the text alone.
    """

    text: Any
    group: str | None = None


@dataclass(frozen=True)
class SourceSpec:
    """A named source of a config.

    Attributes:
        name: lower-case letters, digits, - and _; a folder name.
        kind: dataset, jsonl, bible, botocore or python.
        licence: of the text, for the manifest and the docs.
        options: settings of the kind.
    """

    name: str
    kind: str
    licence: str = "not stated"
    options: dict[str, Any] = field(default_factory=dict)

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

    return {
        "dataset": Kind(
            ("path", "name", "data_files", "data_dir", "split", "revision", "text", "group", "args"),
            1,
            _dataset_identity,
            _dataset_documents,
        ),
        "jsonl": Kind(("data_files", "text", "group"), 1, _jsonl_identity, _jsonl_documents),
        **PACKAGED_KINDS,
    }


def kind_of(spec: SourceSpec) -> Kind:
    """The spec's kind, with its options checked.

    Raises:
        DataError: unknown kind, unknown or missing option.
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
    patterns = spec.options["data_files"]
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = sorted(path for path in glob.glob(str(pattern), recursive=True) if Path(path).is_file())
        if not matches:
            raise DataError(f"source '{spec.name}': no file matches {pattern} (relative to {Path.cwd()})")
        found += [Path(match) for match in matches if Path(match) not in found]
    return found


def _jsonl_identity(spec: SourceSpec) -> Any:
    return [sha256_file(path) for path in matching_files(spec)]


def _jsonl_documents(spec: SourceSpec) -> Iterator[Document]:
    column, group_column = spec.options.get("text", "text"), spec.options.get("group")
    for path in matching_files(spec):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            # Iterating a binary file splits at \n only; str.splitlines would also split inside strings, at U+2028.
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _jsonl_document(line, column, group_column, f"source '{spec.name}': {path} line {number}")


def _jsonl_document(line: bytes, column: str, group_column: str | None, where: str) -> Document:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return Document(line)  # not UTF-8: counted as such by whoever decodes it
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON ({error.msg}); mend or remove the line") from None
    if not isinstance(row, dict) or column not in row:
        columns = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where} has no column '{column}' (it has: {columns}); set the option text")
    group = row.get(group_column) if group_column else None
    return Document(row[column], None if group is None else str(group))


# -- datasets ---------------------------------------------------------------------------------------------------

_BUILDERS = ("json", "parquet", "text", "csv", "arrow")


def _dataset_identity(spec: SourceSpec) -> Any:
    local = spec.options["path"] in _BUILDERS and isinstance(spec.options.get("data_files"), str | list)
    return [sha256_file(path) for path in matching_files(spec)] if local else None


def _dataset_documents(spec: SourceSpec) -> Iterator[Document]:
    import datasets

    options = dict(spec.options)
    column, group_column = options.pop("text", "text"), options.pop("group", None)
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
            group = row.get(group_column) if group_column else None
            yield Document(row[column], None if group is None else str(group))
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        hint = "; kind: jsonl reads on past text that is not UTF-8" if path == "json" else ""
        line = (str(error).splitlines() or [""])[0]
        what = f"{type(error).__name__}: {line}{hint}"
        raise DataError(f"source '{spec.name}': datasets could not read {path}: {what}") from error
