"""A corpus in a bucket: each machine copies it once and reads the copy from then on."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

_MANIFEST = "manifest.json"


def is_address(folder: str) -> bool:
    """Whether data.dir names something in a store (s3://, gs://, file://, ...) instead of a folder."""
    return "://" in folder


def absolute(folder: str) -> str:
    """A path that means the same in other processes; an address stays as it is."""
    return folder if is_address(folder) else os.path.abspath(folder)


def local_corpus(folder: str) -> str:
    """A folder of this machine with the corpus: `folder` itself, or the copy of what is at an address.

    The copy is in SCALEWRIGHT_CACHE (default ~/.cache/scalewright), by address and manifest: a corpus that changed is
    another one. Processes that ask at the same time wait for the one that copies.

    Raises:
        ConfigError: nothing readable is there, or the package that reads such addresses is missing.
    """
    if not is_address(folder):
        return folder
    address = folder.rstrip("/")
    try:
        store, path = _store(address)
    except (ImportError, ValueError) as error:  # fsspec names the package to install
        raise ConfigError(f"data.dir {address}: {' '.join(str(error).split())}") from None
    try:
        with store.open_input_file(f"{path}/{_MANIFEST}") as file:
            manifest: bytes = file.read()
    except Exception as error:  # each kind of storage raises its own
        reason = "there is none" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"data.dir {address}: cannot read {_MANIFEST} there ({' '.join(reason.split())})") from None
    root = Path(os.environ.get("SCALEWRIGHT_CACHE") or Path.home() / ".cache" / "scalewright")
    copy = root / hashlib.sha256(address.encode() + b"\0" + manifest).hexdigest()[:20]
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / f".{copy.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"SCALEWRIGHT_CACHE {root} cannot be made: {error.strerror}; name a folder of yours"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.is_dir():
            _copy(store, path, address, copy)
    return str(copy)


def _store(address: str) -> tuple[Any, str]:
    """(pyarrow FileSystem, path in it). Arrow opens the usual stores by itself, fsspec others with their packages."""
    from pyarrow import ArrowInvalid, fs

    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(address)
        return found
    except ArrowInvalid as error:
        if "Unrecognized filesystem" not in str(error):
            raise
    import fsspec

    other, path = fsspec.core.url_to_fs(address)
    return fs.PyFileSystem(fs.FSSpecHandler(other)), path


def _copy(store: Any, path: str, address: str, copy: Path) -> None:
    """All files, to a folder aside that gets its name when it is whole."""
    from pyarrow import fs

    aside = Path(tempfile.mkdtemp(prefix=f".{copy.name}-", dir=copy.parent))
    try:
        fs.copy_files(path, str(aside), source_filesystem=store, destination_filesystem=fs.LocalFileSystem())
        aside.rename(copy)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        said = " ".join(str(error).split())
        raise ConfigError(f"data.dir {address}: the copy to {copy.parent} failed ({said})") from None
