"""Files and folders of results: can they be written, and writing them."""

from __future__ import annotations

import os
from pathlib import Path

from lm.data.files import write_bytes
from lm.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())


def check_places(files: tuple[Path | None, ...], folders: tuple[Path | None, ...] = ()) -> None:
    """Says before the work, not after it, that results could not be written; None is a place not asked for.

    Folders that are missing are no mistake: write_text makes them.

    Raises:
        ConfigError: a file's place is taken by a folder or the other way round, or its folder cannot be written to.
    """
    for path in filter(None, files):
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a file to write")
        _check_folder(path.parent, path)
    for path in filter(None, folders):
        _check_folder(path, path)


def _check_folder(folder: Path, path: Path) -> None:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir():
        raise ConfigError(f"{path} cannot be written: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: no permission in {there}")
