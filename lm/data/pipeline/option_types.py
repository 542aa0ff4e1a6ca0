"""Types of a stage's options, by its defaults; looked at when a config is read, before any stage runs.

Ranges are each stage's own business (number_option and others of lm.data.pipeline.stage), but for datatrove's filters,
which take any value and fail at the first document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lm.data.files import DataError
from lm.data.options import QUOTES, text_list

_PATH = "model"  # of the options whose default is None, the one that is no list


def check_option_types(kind: str, defaults: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Compare the given options with the types of the defaults.

    Raises:
        DataError: the first that is of another type.
    """
    for name, value in given.items():
        wanted = _wrong(kind, name, defaults[name], value)
        if wanted:
            raise DataError(f"{where}: stage {kind}: {name} must be {wanted}, got {value!r}")


def _wrong(kind: str, name: str, default: Any, value: Any) -> str:
    """What the option must be; empty if it is."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        # datatrove's own ways to switch a rule off: null for Gopher's, -1 for C4's.
        off = value is None and kind.startswith("gopher_")
        low = -1 if kind == "c4" else 0
        return "" if off or _number(value, low) else f"a number of at least {low}"
    if isinstance(default, str) or name == _PATH:
        return "" if isinstance(value, str) or value is default else f"text ({QUOTES})"
    if name.endswith("_n_grams"):
        return "" if _pairs(value) else "a list of [n, fraction]"
    return (
        ""
        if text_list(value) or value is default is None
        else f"a string or a list of strings, at least one ({QUOTES})"
    )


def _number(value: Any, low: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value) and value >= low


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 and _pair(*one) for one in value)


def _pair(n: Any, fraction: Any) -> bool:
    return isinstance(n, int) and _number(n, 1) and _number(fraction, 0)
