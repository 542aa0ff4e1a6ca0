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
    """Whether data.dir names something that fsspec opens (s3://, gs://, file://, ...) instead of a folder."""
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
        import fsspec

        fs, path = fsspec.core.url_to_fs(address)
        manifest: bytes = fs.cat_file(f"{path}/{_MANIFEST}")
    except (ImportError, ValueError) as error:  # fsspec names the package to install
        raise ConfigError(f"data.dir {address}: {' '.join(str(error).split())}") from None
    except Exception as error:  # each kind of storage raises its own
        reason = "there is none" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"data.dir {address}: cannot read {_MANIFEST} there ({' '.join(reason.split())})") from None
    root = Path(os.environ.get("SCALEWRIGHT_CACHE") or Path.home() / ".cache" / "scalewright")
    copy = root / hashlib.sha256(address.encode() + b"\0" + manifest).hexdigest()[:20]
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{copy.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.is_dir():
            _copy(fs, path, address, copy)
    return str(copy)


def _copy(fs: Any, path: str, address: str, copy: Path) -> None:
    """All files, to a folder aside that gets its name when it is whole."""
    aside = Path(tempfile.mkdtemp(prefix=f".{copy.name}-", dir=copy.parent))
    try:
        for file in fs.find(path):
            target = aside / os.path.relpath(file, fs._strip_protocol(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(file, str(target))
        aside.rename(copy)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ConfigError(f"data.dir {address}: the copy to {copy.parent} failed ({error})") from None
