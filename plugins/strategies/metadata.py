"""Reads the .metadata file of a checkpoint without running what is in it.

torch.distributed.checkpoint pickles a description of the tensors there and unpickles it with everything allowed: a
hostile file would run any code. Here only the classes of that description are built.
"""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

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
        for place in metadata.storage_data.values():
            name = getattr(place, "relative_path", None)
            if not is_plain_name(name):
                raise CheckpointError(f"{self.path} is refused: its .metadata names {name!r}, no file inside it")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
