"""Hidden folders that saves leave when they are killed, and the proof that nobody works on one. Standard library only.

The process that assembles a checkpoint holds a lock (flock) on its hidden folder. The system drops the lock when the
process ends, however it ends, so a folder whose lock can be had belongs to nobody. Where a file system has no locks
nothing is proven, and nothing is deleted.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

TEMPORARY = ".tmp"
REMOVED = ".removed"

_OURS = re.compile(r"^\..+\.[0-9a-f]{8}(\.tmp|\.removed)$")  # see checkpoint._hidden
_held: dict[Path, int] = {}


def hold(folder: Path) -> None:
    """Lock a hidden folder until `release` or the end of this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)  # no locks here; `clean` will not get one either
        return
    _held[folder] = descriptor


def release(folder: Path) -> None:
    """Give up the lock that this process holds on a folder, if it does."""
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def clean(folder: Path) -> list[Path]:
    """Delete what killed saves left in a folder of checkpoints: named as ours are, and held by no living process.

    Returns:
        what was deleted.
    """
    deleted = []
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _OURS.match(entry.name) and entry.is_dir() and not entry.is_symlink() and _is_abandoned(entry):
            shutil.rmtree(entry, ignore_errors=True)
            if not entry.exists():
                deleted.append(entry)
    return deleted


def _is_abandoned(folder: Path) -> bool:
    if folder.name.endswith(REMOVED):
        return True  # it has lost its name: whoever gave it up wants it deleted
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
