"""Values of a config's options, checked before anything is read: what is wrong shows at once and not hours later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm.data.files import DataError
from lm.errors import ConfigError

QUOTES = 'in quotes where YAML reads something else, as "no"'
_TEXTS = ("path", "name", "split", "revision", "data_dir", "snapshot_path")
_LISTS = ("data_files", "packages", "services", "exclude")


def text_list(value: Any) -> list[str] | None:
    """A string or a list of strings, as a list; None: something else."""
    values = [value] if isinstance(value, str) else value
    return values if isinstance(values, list) and all(isinstance(one, str) for one in values) else None


def check_source_options(name: str, options: Mapping[str, Any]) -> None:
    """Look at the options of a source that are not names of columns.

    Raises:
        DataError: a value of another type.
    """
    for option, value in options.items():
        if value is None:
            continue
        where = f"source '{name}': option {option} must be"
        if option in _TEXTS and not isinstance(value, str):
            raise DataError(f"{where} text ({QUOTES}), got {value!r}")
        if option == "args" and not isinstance(value, dict):
            raise DataError(f"{where} a mapping of arguments of load_dataset, got {value!r}")
        by_split = option == "data_files" and isinstance(value, dict) and "path" in options  # load_dataset's own form
        if option in _LISTS and text_list(value) is None and not by_split:
            raise DataError(f"{where} a string or a list of strings, got {value!r}")


def real(value: Any, where: str) -> float:
    """A number as a config may give it: YAML reads 4e5 as text.

    Raises:
        ConfigError: something else; `where` says which option.
    """
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where} must be a number, got {value!r}") from None


def whole(value: Any) -> Any:
    """64e6 as 64000000: YAML reads such a number as a float; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
