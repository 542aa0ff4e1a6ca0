"""Rows of a CSV file as people really save them: a byte-order mark, semicolons, tabs, spaces around names."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SEPARATORS = ",;\t"


@dataclass(frozen=True)
class CsvRows:
    """Texts of a CSV file.

    Attributes:
        header: column names, without spaces around them.
        rows: line number in the file and texts by column; None where a row has more values than the header.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[int, dict[str, str] | None], ...]


def read_csv_rows(path: Path) -> CsvRows:
    """Reads a file with a header line. The separator is the header's: a comma, a semicolon or a tab.

    Raises:
        ValueError: no such file, nothing in it, not UTF-8, not a CSV, or a column named twice.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a CSV of runs or mlflow:EXPERIMENT")
    if not path.exists():
        raise ValueError(f"no file {path}; give a CSV of runs or mlflow:EXPERIMENT")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as CSV in UTF-8") from None
    lines = list(io.StringIO(text))
    if not any(line.strip() for line in lines):
        raise ValueError(f"{path} is empty; it needs a header line and a row a run")
    first = next(line for line in lines if line.strip())
    reader = csv.reader(lines, delimiter=max(SEPARATORS, key=first.count))
    try:
        found = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: line {reader.line_num}: {error}") from None
    header = tuple(name.strip() for name in found[0][1])
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise ValueError(f"{path} has {len(twice)} columns named more than once: {', '.join(twice)}; rename them")
    rows = tuple((line, _texts(header, row)) for line, row in found[1:] if any(text.strip() for text in row))
    return CsvRows(header, rows)


def _texts(header: tuple[str, ...], row: list[str]) -> dict[str, str] | None:
    if len(row) > len(header):
        return None
    return dict(zip(header, [text.strip() for text in row] + [""] * (len(header) - len(row)), strict=True))
