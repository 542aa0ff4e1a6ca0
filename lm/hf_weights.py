"""Weights of a Hugging Face folder, read slice by slice and written tensor by tensor: no second copy of a model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lm.config import ModelConfig
from lm.data.files import sync, write_json
from lm.errors import ConfigError
from lm.hf import disagreements, export_factor, from_hf_config, hf_name, parameter_shapes
from lm.init import materialize
from lm.model import Llama

CONFIG, INDEX, SINGLE_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16"}

# Files of old versions hold tables that are computed today, and tied models sometimes their head.
_IGNORED = ("rotary_emb.inv_freq",)


def read_hf_config(folder: str | Path) -> ModelConfig:
    """ModelConfig of a folder's config.json.

    Raises:
        ConfigError: no such folder or file, or a model this package does not have.
    """
    return from_hf_config(read_config_values(folder), str(Path(folder) / CONFIG))


def read_config_values(folder: str | Path) -> dict[str, Any]:
    """What a folder's config.json holds.

    Raises:
        ConfigError: no such folder or file, or it is damaged.
    """
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: {folder} is no Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings: it is no Llama's config.json")
    return values


class HFWeights:
    """The weights of a LlamaForCausalLM folder under this package's names; a source for lm.init.materialize.

    Nothing is read but the headers until `fill`, which reads what the parameter needs: a shard's slice for a shard.

    Args:
        folder: with config.json and model.safetensors, or its shards and their index.
        config: of the model to fill; equal to the folder's but for initial values and muP, whose factors are taken
            out again (lm.hf.export_factor). None: the folder's.

    Raises:
        ConfigError: the folder is none, holds another model than `config`, or lacks tensors.
    """

    def __init__(self, folder: str | Path, config: ModelConfig | None = None) -> None:
        self.folder = Path(folder)
        hf = read_hf_config(self.folder)
        self.config = hf if config is None else config
        different = disagreements(self.config, hf)
        if different:
            raise ConfigError(f"model.config does not fit {self.folder}: {different[0]}")
        self._files = _files_of(self.folder)
        self._check()

    def _check(self) -> None:
        shapes = {hf_name(name): shape for name, shape in parameter_shapes(self.config).items()}
        found = {}
        for path in sorted(set(self._files.values())):
            with _open(path) as file:
                found.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
        for name, shape in shapes.items():
            if name not in found:
                raise ConfigError(f"{self.folder} has no tensor {name}; it is no complete LlamaForCausalLM")
            if found[name] != shape:
                raise ConfigError(f"{self.folder}: {name} is {found[name]}, its config.json makes it {shape}")
        tied = {"lm_head.weight"} if self.config.tie_embeddings else set()
        unknown = [name for name in found if name not in shapes and name not in tied and not name.endswith(_IGNORED)]
        if unknown:
            raise ConfigError(f"{self.folder} has a tensor {unknown[0]}, which this model has no place for")

    def fill(self, name: str, parameter: Tensor) -> None:
        """Copy the weight `name` (or this rank's part of it, for a DTensor) into the parameter, in its dtype."""
        if not isinstance(parameter, DTensor):
            parameter.copy_(self._read(name, tuple(slice(0, size) for size in parameter.shape)))
            return
        placements = parameter.placements
        if all(type(placement) in (Shard, Replicate) for placement in placements):
            mesh = parameter.device_mesh
            sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            if prod(sizes) > 0:
                part = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
                parameter.to_local().copy_(self._read(name, part))
            return
        # Interleaved shards (fully_shard over tensor parallel) are no single slice.
        whole = self._read(name, tuple(slice(0, size) for size in parameter.shape)).to(parameter.device)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, placements, src_data_rank=None))

    def _read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Part of a weight as this package has it, fp32 on the CPU."""
        theirs = hf_name(name)
        with _open(self._files[theirs]) as file:
            tensor = file.get_slice(theirs)[part].float()
        factor = export_factor(name, self.config)
        return tensor if factor == 1.0 else tensor / factor


def load_hf(folder: str | Path, device: torch.device | str = "cpu") -> Llama:
    """The model of a Hugging Face folder, fp32, for use outside of a run."""
    weights = HFWeights(folder)
    with torch.device("meta"):
        model = Llama(weights.config)
    materialize(model, weights.config, 0, device, weights)
    return model


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by Hugging Face's name."""
    if (folder / INDEX).is_file():
        names = json.loads((folder / INDEX).read_bytes())["weight_map"]
        files = {name: folder / file for name, file in names.items()}
        absent = sorted({path.name for path in files.values() if not path.is_file()})
        if absent:
            raise ConfigError(f"{folder} lacks {absent[0]}, which its {INDEX} names; copy the folder again")
        return files
    path = folder / SINGLE_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}; save the model as safetensors first")
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    max_shard_bytes: int,
    progress: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Write tensors as safetensors into `folder`, each read when its turn comes and dropped before the next.

    Args:
        shapes: of all tensors, by the name they get in the file, in the order they are written.
        read: the tensor of a name, in any dtype and on any device.
        dtype: float32 or bfloat16, of all tensors in the files.
        max_shard_bytes: tensors beyond it begin another file; a larger tensor has a file of its own.
        progress: gets a line for each finished file.

    Returns:
        The files' names; with several, an index was written too.
    """
    shards = list(_shards(shapes, dtype, max_shard_bytes))
    files, weight_map = [], {}
    for number, names in enumerate(shards, start=1):
        one = len(shards) == 1
        file = SINGLE_FILE if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        written = _write_file(folder / file, {name: shapes[name] for name in names}, read, dtype)
        progress(f"{file}: {len(names)} tensors, {written:,} bytes")
        files.append(file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(prod(shape) for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    return files


def _shards(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if names and filled + size > max_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _write_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor], dtype: torch.dtype
) -> int:
    """One safetensors file; its size in bytes.

    The format: 8 bytes little-endian length of the header, the header (JSON: dtype, shape and byte range of each
    tensor, padded with spaces to a multiple of 8), the tensors. safetensors' own writer wants all tensors at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            tensor = read(name)
            if tuple(tensor.shape) != tuple(shape):
                raise ConfigError(f"{name} is {tuple(tensor.shape)} where {tuple(shape)} was announced")
            _write_tensor(stream, tensor.detach().to("cpu", dtype).contiguous())
        sync(stream)
    return 8 + len(text) + end


def _write_tensor(stream: Any, tensor: Tensor) -> None:
    stream.write(tensor.flatten().view(torch.uint8).numpy().data)  # no copy
