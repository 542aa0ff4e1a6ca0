"""Checkpoint folders that are complete or do not exist. Standard library only.

A checkpoint is a folder. It is written under a hidden name beside its place and renamed when every byte and then
the manifest have reached the disk, so a crash, a full disk or a kill leaves the older checkpoints as they were:

    step-00000100/
        __0_0.distcp, __1_0.distcp, ..., .metadata     tensors (torch.distributed.checkpoint)
        state.pt                                       everything else (torch.load(..., weights_only=True))
        manifest.json                                  size and sha256 of each file above; written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from lm.errors import ConfigError
from plugins.strategies import leftovers
from plugins.strategies.leftovers import REMOVED, TEMPORARY

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
DAMAGED, ABANDONED = "damaged-", "abandoned-"  # what set-aside folders begin with


class CheckpointError(ConfigError):
    """A checkpoint cannot be written or read; the message is one line that says which and what to do."""


def begin(path: Path) -> Path:
    """Create the hidden folder in which the checkpoint `path` is assembled, and return it.

    What killed saves left beside it is deleted first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*{TEMPORARY}"):
        leftovers.release(leftover)  # this process failed to save here before, and is at it again
    leftovers.clean(path.parent)
    temporary = _hidden(path, TEMPORARY)
    temporary.mkdir()
    leftovers.hold(temporary)
    return temporary


def abandon(temporary: Path) -> None:
    """Delete what `begin` created, after a failure."""
    leftovers.release(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def finish(temporary: Path, path: Path, files: Mapping[str, Mapping], step: int) -> None:
    """Write the manifest into `temporary` and give the folder its final name, replacing an older one of that name.

    Args:
        files: size in bytes and sha256 of each file, as `describe` returns them, for all files in the folder.
        step: optimizer steps done, by which `latest` orders checkpoints.
    """
    manifest = {"format": FORMAT_VERSION, "step": step, "files": dict(sorted(files.items()))}
    with open(temporary / MANIFEST, "w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(temporary)
    replaced = None
    if path.exists():
        replaced = _hidden(path, REMOVED)
        os.rename(path, replaced)
    os.rename(temporary, path)
    leftovers.release(temporary)
    _sync_folder(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a checkpoint. It loses its name first, so a half-deleted folder is never taken for a checkpoint."""
    hidden = _hidden(path, REMOVED)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def set_aside(path: Path, prefix: str = DAMAGED) -> Path:
    """Take a checkpoint out of the way, without deleting it: no save may find its place taken by it.

    Returns:
        where it is now: <prefix><name> beside it, or `path` itself on a read-only file system.
    """
    aside = path.with_name(f"{prefix}{path.name}")
    if aside.exists():
        aside = path.with_name(f"{aside.name}-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(path, aside)
    except OSError:
        return path
    return aside


def file_names(folder: Path) -> list[str]:
    """Names of all files of a checkpoint but the manifest, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_file() and entry.name != MANIFEST)


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """{"bytes": size, "sha256": hex digest} of each named file."""
    described = {}
    for name in names:
        with open(folder / name, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        described[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return described


def read_manifest(folder: Path) -> dict:
    """The manifest of a complete checkpoint: {"format", "step", "files"}.

    Every listed file is there with its size; contents are compared by `verify`.

    Raises:
        CheckpointError: the folder is missing, is no checkpoint, is incomplete, or names files outside of it.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder {folder}; check the path")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder} has no readable {MANIFEST}: it is no complete checkpoint") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has checkpoint format {version}, this version reads {FORMAT_VERSION}")
    for name, entry in files.items():
        if not is_plain_name(name) or (folder / name).is_symlink():
            raise CheckpointError(f"{folder} is refused: its {MANIFEST} names {name!r}, which is no file inside it")
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{folder} is torn: {name} is missing; use an older checkpoint") from None
        if size != entry["bytes"]:
            raise CheckpointError(
                f"{folder} is torn: {name} has {size} bytes instead of {entry['bytes']}; use an older checkpoint"
            )
    return manifest


def verify(folder: Path, files: Mapping[str, Mapping], names: Iterable[str]) -> None:
    """Compare the sha256 of the named files with the manifest's `files`.

    Raises:
        CheckpointError: a file's content is not what was written.
    """
    for name, entry in describe(folder, names).items():
        if entry["sha256"] != files[name]["sha256"]:
            raise CheckpointError(f"{folder} is damaged: {name} differs from its sha256; use an older checkpoint")


def latest(folder: str | Path) -> Path | None:
    """The complete checkpoint with the most steps in `folder`, or None. Unfinished and torn ones get a warning.

    Call it on one rank and broadcast the answer: another rank may look a moment later and see another folder.
    """
    folder = Path(folder)
    for entry in folder.glob(f".*{TEMPORARY}"):
        warnings.warn(f"skipped {entry}: a save that did not finish", stacklevel=2)
    best: tuple[int, int, Path] | None = None
    for entry in candidates(folder):
        try:
            manifest = read_manifest(entry)
        except CheckpointError as error:
            warnings.warn(f"skipped {entry}: {error}", stacklevel=2)
            continue
        found = (int(manifest.get("step", -1)), entry.stat().st_mtime_ns, entry)
        if best is None or found > best:
            best = found
    return None if best is None else best[2]


def candidates(folder: Path) -> list[Path]:
    """Folders in `folder` that may be checkpoints, sound or not, the one with the most steps first."""

    def age(entry: Path) -> tuple[int, int]:
        try:
            step = int(json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError):
            digits = entry.name.rpartition("-")[2]
            step = int(digits) if digits.isdecimal() else -1
        return step, entry.stat().st_mtime_ns

    entries = folder.iterdir() if folder.is_dir() else ()
    named = [entry for entry in entries if entry.is_dir() and not entry.name.startswith((".", DAMAGED, ABANDONED))]
    return sorted(named, key=age, reverse=True)


def is_plain_name(name: object) -> bool:
    """True for the name of a file of this folder: no path, absolute or relative, and not the folder or its parent."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\\" not in name


def _hidden(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}{suffix}"


def _sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
