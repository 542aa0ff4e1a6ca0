"""Plain values from YAML to a frozen dataclass, each mistake one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lm.data.options import real
from lm.errors import ConfigError

_T = TypeVar("_T")


def load(
    path: str | Path, overrides: Mapping[str, Any] | None, parse: Callable[[Mapping[str, Any]], _T], example: str
) -> _T:
    """Read settings from a YAML file.

    Args:
        overrides: top-level values that win over the file's.
        parse: makes them of plain values.
        example: file to name when this one is empty.

    Raises:
        ConfigError: no such file, not YAML, or what `parse` refuses; it begins with the path.
    """
    path = Path(path)
    try:
        raw = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no settings; see {example}")
    try:
        return parse({**raw, **(overrides or {})})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        ConfigError: it is not YAML. OSError: it cannot be read.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def check_names(raw: Mapping[str, Any], owned: Mapping[str, str], needed: Sequence[str], sweep: str) -> None:
    """Refuse settings that a kind of sweep does not share with IsoFLOP sweeps, and ask for those that it needs.

    Args:
        owned: settings of an IsoFLOP sweep and what stands in their place.
        sweep: names the kind.

    Raises:
        ConfigError: the first that is wrong.
    """
    for name, instead in owned.items():
        if name in raw:
            raise ConfigError(f"{name} is a setting of sweeps.isoflop; {sweep} takes {instead}")
    for name in needed:
        if name not in raw:
            raise ConfigError(f"{name} is missing")


def make(kind: type[_T], values: Any, where: str) -> _T:
    prefix = f"{where}." if where else ""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a set of settings, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise ConfigError(f"unknown setting {prefix}{unknown[0]}; known: {', '.join(fields)}")
    missing = [
        name for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{prefix}{missing[0]} is missing")
    typed = {name: _number(fields[name].type, value, prefix + name) for name, value in values.items()}
    return kind(**typed)


def _number(annotation: Any, value: Any, where: str) -> Any:
    """YAML reads 4e5 as a string, and 4.0 where a whole number is meant: accept both, refuse the rest."""
    if annotation == "int":
        return whole(value, where)
    if annotation == "float" or (annotation == "float | None" and value is not None):
        return real(value, where)
    return value


def whole(value: Any, where: str) -> int:
    number = real(value, where)
    if not number.is_integer():
        raise ConfigError(f"{where} must be a whole number, got {value!r}")
    return int(number)


def as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, got {value!r}")
    return list(value)
