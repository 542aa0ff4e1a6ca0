"""A fit on disk as numbers: JSON for the structure, one npz for the arrays. No pickle.

Every result here is a frozen dataclass of numbers, arrays and other such dataclasses, so a fit can be written as what
it is made of and built again by name. Reading runs no code from the files: only dataclasses of this package are built.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.scaling.table import FitError

PACKAGE = "sweeps.scaling"
STRUCTURE, ARRAYS = "fit.json", "arrays.npz"
_CLASS, _ARRAY, _TUPLE, _MAP = "dataclass", "array", "tuple", "map"


def write(value: Any, folder: Path) -> None:
    """Writes a dataclass of this package (or a tuple or dict of them) into a folder, made when missing.

    Raises:
        TypeError: something in it is neither a number, text, array, tuple, list, dict nor dataclass of this package.
    """
    arrays: dict[str, np.ndarray] = {}
    structure = _pack(value, arrays, "fit")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STRUCTURE).write_text(json.dumps(structure, indent=1))
    np.savez_compressed(folder / ARRAYS, **arrays)  # type: ignore[arg-type]


def read(folder: Path) -> Any:
    """What `write` wrote.

    Raises:
        FitError: files are missing, or name a class this version does not have.
    """
    if not (folder / STRUCTURE).is_file() or not (folder / ARRAYS).is_file():
        raise FitError(f"{folder} holds no stored fit ({STRUCTURE}, {ARRAYS})")
    with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
        return _unpack(json.loads((folder / STRUCTURE).read_text()), arrays)


def _pack(value: Any, arrays: dict[str, np.ndarray], place: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        arrays[place] = value
        return {_ARRAY: place}
    if isinstance(value, tuple | list):
        return {_TUPLE: [_pack(item, arrays, f"{place}.{i}") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        return {_MAP: [[key, _pack(item, arrays, f"{place}.{key}")] for key, item in value.items()]}
    kind = type(value)
    if dataclasses.is_dataclass(kind) and kind.__module__.startswith(f"{PACKAGE}."):
        fields = {f.name: _pack(getattr(value, f.name), arrays, f"{place}.{f.name}") for f in dataclasses.fields(kind)}
        return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    raise TypeError(f"{place} is a {kind.__module__}.{kind.__qualname__}, which is not stored as numbers")


def _unpack(value: Any, arrays: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return arrays[value[_ARRAY]]
    if _TUPLE in value:
        return tuple(_unpack(item, arrays) for item in value[_TUPLE])
    if _MAP in value:
        return {key: _unpack(item, arrays) for key, item in value[_MAP]}
    return _build(value[_CLASS], {key: _unpack(item, arrays) for key, item in value["fields"].items()})


def _build(name: str, fields: dict[str, Any]) -> Any:
    module, _, qualified = name.partition(":")
    if not module.startswith(f"{PACKAGE}."):
        raise FitError(f"a stored fit names {name}, which is not part of {PACKAGE}")
    kind = getattr(importlib.import_module(module), qualified, None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise FitError(f"a stored fit names {name}, which this version does not have")
    try:
        return kind(**fields)
    except TypeError:
        raise FitError(f"a stored fit has other numbers of {name} than this version; fit the runs again") from None
