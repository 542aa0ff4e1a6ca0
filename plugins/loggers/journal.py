"""A run's local record, RUN/metrics.jsonl: every metric and whatever else MLflow is to get, in the order it was logged.

One JSON object a line, written before anything is sent:

    {"step": 40, "time": 1735689600000, "metrics": {"loss": 3.21, "grad_norm": "NaN"}}
    {"do": "create" | "params" | "tags" | "artifact" | "text" | "status" | "rewind", "time": ..., ...}

Times are milliseconds since the epoch, at which it was logged. Values that JSON lacks are "NaN", "Infinity" and
"-Infinity". Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

FILE = "metrics.jsonl"

# What each kind of record must have for MLflow to be told; of a newer version's kinds nothing is known.
_FIELDS: dict[str, dict[str, type]] = {
    "create": {"experiment": str, "tags": dict, "token": str},
    "params": {"params": dict},
    "tags": {"tags": dict},
    "artifact": {"path": str},
    "text": {"file": str, "text": str},
    "status": {"status": str},
    "rewind": {"step": int},
}


def is_record(record: Any) -> bool:
    """True for what a line may hold; anything else is damage, and must stop neither the run nor what comes after it."""
    if not isinstance(record, dict) or not isinstance(record.get("time"), int):
        return False
    if "metrics" in record:
        values = record["metrics"]
        return (
            isinstance(record.get("step"), int)
            and isinstance(values, dict)
            and all(isinstance(v, int | float) or v in ("NaN", "Infinity", "-Infinity") for v in values.values())
        )
    do = record.get("do")
    if not isinstance(do, str):
        return False
    return all(isinstance(record.get(field), kind) for field, kind in _FIELDS.get(do, {}).items())


class Journal:
    """Appends to and reads from one file. Appending never raises: lines that a full disk refuses wait in memory.

    Args:
        path: made at the first line. A last line that a crash cut short is passed over, and removed by the next one.

    Attributes:
        size: bytes of whole lines in the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._file: Any = None
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        with contextlib.suppress(FileNotFoundError):
            self.size = _whole_lines(path)

    @property
    def waiting(self) -> int:
        """Lines that the disk did not take yet; the next append tries again."""
        return len(self._waiting)

    def append(self, record: dict[str, Any]) -> None:
        """Add a line. It survives a kill of this process at once, a power cut after `sync`."""
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
        with self._lock:
            self._waiting.append(line)
            with contextlib.suppress(OSError):
                self._write()

    def sync(self) -> None:
        """Make what was appended outlive a power cut, as far as the disk takes it."""
        with contextlib.suppress(OSError):
            with self._lock:
                if self._waiting:
                    self._write()
                file = self._file
            if file is not None:
                os.fsync(file.fileno())  # without the lock: a slow disk must not hold up `append`

    def read(self, offset: int = 0, end: int | None = None) -> Iterator[tuple[dict[str, Any], int]]:
        """(record, offset of the next one) of each line from `offset`, a line's beginning, up to `end` or `size`.

        Lines that are not JSON, or no record as this class was given it (a damaged disk), are passed over.
        """
        end = self.size if end is None else end
        if offset >= end:
            return
        with self.path.open("rb") as file:
            file.seek(offset)
            while offset < end and (line := file.readline()):
                offset += len(line)
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if is_record(record):
                        yield record, offset

    def close(self) -> None:
        self.sync()
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        self._open()
        while self._waiting:
            line = self._waiting[0]
            try:
                written = self._file.write(line)
            except OSError:
                written = 0
            if written != len(line):
                os.ftruncate(self._file.fileno(), self.size)  # no half line before the next one
                return
            self.size += len(line)
            self._waiting.pop(0)

    def _open(self) -> None:
        if self._file is not None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab", buffering=0)
        self.size = _whole_lines(self.path)
        os.ftruncate(file.fileno(), self.size)
        self._file = file


def _whole_lines(path: Path) -> int:
    """Bytes up to and with the last line end."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0


def open_journal(run_dir: Path) -> Journal:
    """The journal of a run that is there.

    Raises:
        ConfigError: the folder holds none.
    """
    if not (run_dir / FILE).is_file():
        raise ConfigError(f"{run_dir} holds no {FILE}: give the folder of a run, such as runs/NAME")
    return Journal(run_dir / FILE)


def encode(value: float) -> float | str:
    """A float as JSON has it."""
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode(value: float | str) -> float:
    """The float that `encode` was given."""
    return float(value)
