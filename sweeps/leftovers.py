"""Temporary folders of cells, removed when their process can no longer do it."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "scalewright-cell-", ".lock"


@contextlib.contextmanager
def cell_folder() -> Iterator[Path]:
    """A folder as long as the block. Its lock ends with the process, however that ends."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = (folder / _LOCK).open("w")
        if _take(lock) and (folder / _LOCK).exists():
            break
        lock.close()  # a sweep that starts just now took it for a leftover
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_leftovers() -> int:
    """Remove folders of this machine whose process is gone; how many. Others' and those without a lock stay."""
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            if _take(lock):
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed


def _take(lock: object) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return False
    return True
