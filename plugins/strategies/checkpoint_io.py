"""All ranks write or read one checkpoint folder together, through torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from plugins.strategies import checkpoint, collectives
from plugins.strategies.checkpoint import CheckpointError
from plugins.strategies.metadata import PlainReader

STATE = "state.pt"

_checked: set[Path] = set()  # folders that `check` found sound and nobody has read yet


def save(tensors: dict[str, Tensor], rest: dict[str, Any], path: Path, step: int) -> None:
    """Write a checkpoint folder. Collective; on return it is complete, on error it is not there.

    Args:
        tensors: this rank's tensors by key. Ordinary tensors under one key must be equal on the ranks that bring it;
            DTensors are written as shards.
        rest: plain values, the same on all ranks; rank 0 writes them.
        path: the final folder; rank 0's counts.
        step: optimizer steps done.

    Raises:
        CheckpointError: on all ranks.
    """
    data = serialize(rest, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        write(tensors, data, path, step)


def serialize(rest: dict[str, Any], path: Path) -> bytes:
    """The bytes of state.pt on rank 0, none on the others. Collective.

    Raises:
        CheckpointError: on all ranks; `rest` holds what could not be loaded again.
    """
    data, error = _attempt(lambda: _serialize(rest) if collectives.rank() == 0 else b"")
    collectives.raise_together(error, f"cannot save {path}")
    return data


def write(
    tensors: dict[str, Tensor], data: bytes, path: Path, step: int, group: dist.ProcessGroup | None = None
) -> None:
    """`save` with what `serialize` returned. Collective over `group`; changes nothing but files.

    Raises:
        CheckpointError: on all ranks.
    """
    path = Path(collectives.broadcast(str(path), group))
    doing = f"cannot save {path}"
    temporary, error = None, None
    if collectives.rank() == 0:
        temporary, error = _attempt(lambda: checkpoint.begin(path))
    collectives.raise_together(error, doing, group)
    temporary = collectives.broadcast(temporary, group)
    try:
        _, error = _attempt(lambda: _write(tensors, data, temporary, group))
        collectives.raise_together(error, doing, group)
        files = _describe_together(temporary, doing, group)
        error = None
        if collectives.rank() == 0:
            _, error = _attempt(lambda: checkpoint.finish(temporary, path, files, step))
        collectives.raise_together(error, doing, group)
    except BaseException:
        if collectives.rank() == 0:
            checkpoint.abandon(temporary)
        raise


def check(path: Path) -> str | None:
    """None when a checkpoint is complete and every file has its sha256, else one line that says what is wrong.

    Collective, with the same `path` and the same answer on all ranks. A Reader does not read all files again to check.
    """
    try:
        _verify(path)
    except CheckpointError as error:
        return collectives.one_line(error)
    _checked.add(path)
    return None


def _verify(path: Path) -> None:
    """Compare sizes and sha256 of all files with the manifest, shared out: each rank takes every world-th file."""

    def mine() -> None:
        files = checkpoint.read_manifest(path)["files"]
        checkpoint.verify(path, files, sorted(files)[collectives.rank() :: collectives.world_size()])

    _, error = _attempt(mine)
    collectives.raise_together(error, f"cannot load {path}")


_KINDS = {"global_step": int, "epoch": int, "loops": dict, "callbacks": dict, "lr_schedulers": list, "optimizer": dict}


def read_rest(file: Path) -> dict[str, Any]:
    """What was saved beside the tensors, read without running what is in it.

    Raises:
        CheckpointError: it is no state of a run.
    """
    try:
        rest = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = (
            f"it asks for {asked[1]}, which no checkpoint needs" if asked else f"unreadable ({type(error).__name__})"
        )
        raise CheckpointError(f"{file} is refused: {reason}") from None
    if not isinstance(rest, dict):
        raise CheckpointError(f"{file} holds no state of a run but a {type(rest).__name__}")
    for key, kind in _KINDS.items():
        if key in rest and not isinstance(rest[key], kind):
            raise CheckpointError(f"{file}: {key} is a {type(rest[key]).__name__}, not a {kind.__name__}")
    if "optimizer" in rest and not isinstance(rest["optimizer"].get("scalars"), dict):
        raise CheckpointError(f"{file}: its optimizer has no scalars")
    return rest


class Reader:
    """A verified checkpoint, open for reading. Creating it is collective, and so are its methods.

    Attributes:
        path: the folder.
        rest: what was saved beside the tensors.
        metadata: keys, shapes and dtypes of the saved tensors.

    Raises:
        CheckpointError: on all ranks; the folder is missing, incomplete or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(collectives.broadcast(str(path)))
        if self.path in _checked:
            _checked.discard(self.path)
        else:
            _verify(self.path)
        self.rest: dict[str, Any] = self.together(lambda: read_rest(self.path / STATE))
        self.metadata: Metadata = self.together(lambda: PlainReader(self.path).read_metadata())

    def together(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every rank; raise on all when it fails on any."""
        value, error = _attempt(action)
        collectives.raise_together(error, f"cannot load {self.path}")
        return value

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Fill the given tensors in place; DTensors take their shards, however the checkpoint was sharded."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process.*")
            self.together(
                lambda: dcp.load(
                    tensors,
                    storage_reader=PlainReader(self.path),
                    no_dist=not collectives.is_distributed(),
                )
            )


def _write(tensors: dict[str, Tensor], data: bytes, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Tensors by all ranks, the rest by rank 0, all of it synced to the disk."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    # Sorted: which rank writes which tensor depends on their order, and that of optimizer states on the file that they
    # were loaded from. A run that was resumed writes the same bytes as one that never stopped.
    tensors = dict(sorted(tensors.items()))
    dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=not collectives.is_distributed())
    if collectives.rank() == 0:
        with open(folder / STATE, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())


def _serialize(rest: dict[str, Any]) -> bytes:
    """torch.save, tried against weights_only=True: what cannot be read back safely must fail now, not on resume."""
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    data = buffer.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        raise CheckpointError(f"{_unloadable(rest)} holds more than plain values and tensors") from None
    return data


def _unloadable(rest: dict[str, Any]) -> str:
    """The first key of the dictionary whose value weights_only=True refuses."""
    for key, value in rest.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception:
            return f"the state {key!r}"
    return "the state"


def _describe_together(folder: Path, doing: str, group: dist.ProcessGroup | None) -> dict[str, dict]:
    """Sizes and hashes of all files in the folder, each hashed by one rank."""
    names, world = collectives.broadcast(checkpoint.file_names(folder), group), collectives.world_size()
    mine, error = _attempt(lambda: checkpoint.describe(folder, names[collectives.rank() :: world]))
    collectives.raise_together(error, doing, group)
    files: dict[str, dict] = {}
    for part in collectives.gather(mine, group):
        files |= part
    return files


def _attempt(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    # CheckpointException is no Exception; it has reached all ranks already, like whatever DCP agreed on.
    try:
        return action(), None
    except (Exception, CheckpointException) as error:
        return None, error
