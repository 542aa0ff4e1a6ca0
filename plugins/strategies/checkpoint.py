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

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_TEMPORARY = ".tmp"
_REMOVED = ".removed"


class CheckpointError(ConfigError):
    """A checkpoint cannot be written or read; the message is one line that says which and what to do."""


def begin(path: Path) -> Path:
    """Create the hidden folder in which the checkpoint `path` is assembled, and return it.

    Temporary folders that earlier, killed saves left for the same place are deleted first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*"):
        if leftover.name.endswith((_TEMPORARY, _REMOVED)):
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = _hidden(path, _TEMPORARY)
    temporary.mkdir()
    return temporary


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
        replaced = _hidden(path, _REMOVED)
        os.rename(path, replaced)
    os.rename(temporary, path)
    _sync_folder(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def remove(path: Path) -> None:
    """Delete a checkpoint. It loses its name first, so a half-deleted folder is never taken for a checkpoint."""
    hidden = _hidden(path, _REMOVED)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


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
        CheckpointError: the folder is missing, is no checkpoint, or is incomplete.
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
    best: tuple[int, int, Path] | None = None
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not entry.is_dir():
            continue
        if entry.name.startswith("."):
            if entry.name.endswith(_TEMPORARY):
                warnings.warn(f"skipped {entry}: a save that did not finish", stacklevel=2)
            continue
        try:
            manifest = read_manifest(entry)
        except CheckpointError as error:
            warnings.warn(f"skipped {entry}: {error}", stacklevel=2)
            continue
        candidate = (int(manifest.get("step", -1)), entry.stat().st_mtime_ns, entry)
        if best is None or candidate > best:
            best = candidate
    return None if best is None else best[2]


def _hidden(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}{suffix}"


def _sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
