"""One training process group a run folder: a second one would write the same journal and checkpoints."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

FILE = ".training.lock"
WAIT_SECONDS = 15.0  # for a process that is about to end: what restarts runs may be quicker than what ends them

_held: dict[Path, Any] = {}  # open files by run folder; a process that dies lets go of its locks


def hold(run_dir: Path) -> str | None:
    """Become the one that trains in an existing run folder, on rank 0; again and again is fine.

    Returns:
        None, or one line that says why not: another process trains there, and still does after WAIT_SECONDS.
    """
    run_dir = run_dir.absolute()
    if held(run_dir):
        return None
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        file = (run_dir / FILE).open("a")
    except OSError:  # read-only or full: nothing can be written there anyway, and that is told elsewhere
        return None
    while True:
        try:
            # Not flock: data loader workers would inherit it and hold it after their parent was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                file.close()
                return f"another process trains in {run_dir}; wait until it is over or stop it, or take another --name"
            time.sleep(0.2)
            continue
        except OSError:  # a file system without locks
            pass
        _held[run_dir] = file
        return None


def held(run_dir: Path) -> bool:
    """Whether this process is the one that trains there."""
    return run_dir.absolute() in _held


def release(run_dir: Path) -> None:
    """Let others train in this run folder."""
    file = _held.pop(run_dir.absolute(), None)
    if file is not None:
        file.close()
