"""Reads the .metadata file of a checkpoint without running what is in it.

torch.distributed.checkpoint pickles a description of the tensors there and unpickles it with everything allowed: a
hostile file would run any code. Here only the classes of that description are built.
"""

from __future__ import annotations

import math
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata

from plugins.strategies.checkpoint import CheckpointError, is_plain_name

_DESCRIPTION = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_DESCRIPTION, "BytesStorageMetadata"),
    (_DESCRIPTION, "ChunkStorageMetadata"),
    (_DESCRIPTION, "Metadata"),
    (_DESCRIPTION, "MetadataIndex"),
    (_DESCRIPTION, "StorageMeta"),
    (_DESCRIPTION, "TensorProperties"),
    (_DESCRIPTION, "TensorStorageMetadata"),
    (_DESCRIPTION, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return pathlib.PurePosixPath  # only a name, of the folder it was written to
        raise CheckpointError(f"its .metadata asks for {module}.{name}, which no checkpoint needs")


def check_description(metadata: Metadata, folder: pathlib.Path) -> None:
    """Hold a description against itself and the files' sizes: what is missing would be left unread, without a word.

    Raises:
        CheckpointError: a tensor is not covered by its pieces, or a piece lies outside of its tensor or file.
    """
    places: dict[tuple[str, Any], Any] = {}
    sizes: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        name = place.relative_path
        if not is_plain_name(name):
            raise CheckpointError(f"its .metadata names {name!r}, no file inside it")
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size
        if place.offset < 0 or place.length < 0 or place.offset + place.length > sizes[name]:
            raise CheckpointError(f"its .metadata places {index.fqn} outside of {name}")
        places[index.fqn, None if index.offset is None else tuple(index.offset)] = place
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if not isinstance(entry.properties, TensorProperties) or not _is_whole(key, entry, places):
            raise CheckpointError(f"its .metadata does not say where all of {key} is")


def _is_whole(key: str, entry: TensorStorageMetadata, places: Mapping[tuple[str, Any], Any]) -> bool:
    """True when the pieces lie inside the tensor, have a place in a file, and are together as many elements as it."""
    size, elements, seen = tuple(entry.size), 0, set()
    for piece in entry.chunks:
        start, shape = tuple(piece.offsets), tuple(piece.sizes)
        if not math.prod(shape):
            continue  # the empty share of a rank
        if not len(start) == len(shape) == len(size) or start in seen or (key, start) not in places:
            return False
        if any(a < 0 or n < 0 or a + n > whole for a, n, whole in zip(start, shape, size, strict=True)):
            return False
        seen.add(start)
        elements += math.prod(shape)
    return elements == math.prod(size)


class PlainReader(dcp.FileSystemReader):
    """FileSystemReader that takes nothing from .metadata but descriptions of tensors in files of its own folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of the saved tensors.

        Raises:
            CheckpointError: it holds anything else, or points outside the folder.
        """
        with open(pathlib.Path(str(self.path)) / ".metadata", "rb") as stream:
            try:
                metadata = _Unpickler(stream).load()
            except CheckpointError as error:
                raise CheckpointError(f"{self.path} is refused: {error}") from None
            except Exception as error:
                raise CheckpointError(f"{self.path}/.metadata cannot be read ({type(error).__name__})") from None
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{self.path}/.metadata describes no tensors")
        try:
            check_description(metadata, pathlib.Path(str(self.path)))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path} is refused: {error}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}/.metadata describes no tensors ({error})") from None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
