"""Files of commands: configs that they read, results that they write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lm.data.files import write_bytes
from lm.errors import ConfigError


def read_config(path: Path, examples: str) -> dict[str, Any]:
    """Names and values of a YAML file, interpolations resolved.

    Args:
        examples: folder to name where the file is none.

    Raises:
        ConfigError: no such file, not YAML, or no names in it.
    """
    from omegaconf import OmegaConf

    if not path.is_file():
        raise ConfigError(f"config {path} does not exist; examples are in {examples}")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # of YAML, of OmegaConf, of decoding
        raise ConfigError(f"config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config {path} must hold names and values; examples are in {examples}")
    return {str(key): value for key, value in values.items()}


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
