"""Files that are whole or absent: written aside, flushed, renamed. One lock a folder. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

_ASIDE = re.compile(r"\.[0-9a-f]{32}\.tmp$")  # a name of write_bytes


class DataError(ConfigError):
    """Bad input or a bad state on disk; the message is one line that says what, where and what to do."""


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader, or a run after a kill, sees the old content or the new one.

    Two writers do not meet, and one that fails leaves nothing beside it.
    """
    # Named by chance: two machines on one file system may be at it under one process id.
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            sync(file)
        aside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # the name that the caller knows
        raise


def leftovers(folder: Path) -> list[Path]:
    """What writers of files anywhere below the folder left aside when they were killed, or have not finished yet."""
    return [path for path in folder.rglob(".*.tmp") if _ASIDE.search(path.name)]


def remove_leftovers(folder: Path) -> None:
    """Remove `leftovers`. Whoever calls this holds the lock of the folder: no such writer is at work."""
    for path in leftovers(folder):
        path.unlink(missing_ok=True)


def discard(folder: Path, *marks: str) -> None:
    """Remove a folder; killed in between, it leaves nothing that looks whole.

    Args:
        marks: files without which nobody takes the folder for a whole one; they go first.
    """
    for mark in marks:
        with suppress(FileNotFoundError, NotADirectoryError):  # a stray file may stand where a folder is expected
            (folder / mark).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """As write_bytes; the same value in the same order gives the same bytes."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def plain(value: Any) -> Any:
    """Plain values for JSON: dicts and lists; NaN and infinities, which JSON lacks, become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Value of a JSON file.

    Raises:
        DataError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is damaged (not JSON); prepare the data again with --overwrite") from None


def sync(file: Any) -> None:
    """Flush to the disk, so that a rename after it never shows an empty file."""
    file.flush()
    os.fsync(file.fileno())


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex digest of a plain value, independent of dictionary order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


@contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Hold the lock file `path`; the kernel lets go of it when the process ends, however it ends.

    Raises:
        DataError: another process holds it; the message is `busy` with its process id.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise DataError(f"{busy} (process {file.read().strip() or 'unknown'})") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"no space left while writing below {where}; free some or choose another --out"
                " (finished parts are kept: the same command goes on from there)"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise DataError(f"cannot write below {where}: {error.strerror}; choose another --out") from error
        raise
