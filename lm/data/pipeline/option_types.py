"""A stage's options against its defaults and what it allows, when a config is read: nothing wrong shows hours later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lm.data.files import DataError
from lm.data.options import QUOTES, text_list, whole
from lm.data.pipeline.stage import Range

_PATH = "model"  # of the options whose default is None, the one that is no list

Allowed = Mapping[str, Range | tuple[str, ...]]


def checked_options(
    kind: str, defaults: Mapping[str, Any], allowed: Allowed, given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The given options; 64e6 where a whole number is wanted as 64000000.

    Args:
        allowed: as StageKind.allowed.

    Raises:
        DataError: the first that is of another type than its default, or not allowed.
    """
    found = {}
    for name, value in given.items():
        wanted = _wrong(name, defaults[name], allowed.get(name), value)
        if wanted:
            raise DataError(f"{where}: stage {kind}: {name} must be {wanted}, got {value!r}")
        limit = allowed.get(name)
        found[name] = whole(value) if isinstance(limit, Range) and limit.whole else value
    return found


def _wrong(name: str, default: Any, allowed: Range | tuple[str, ...] | None, value: Any) -> str:
    """What the option must be; empty if it is."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(allowed, Range):
        return "" if _within(value, allowed) else _words(allowed)
    if isinstance(default, str) or name == _PATH:
        if allowed is not None:
            return "" if value in allowed else f"one of {', '.join(allowed)}"
        return "" if isinstance(value, str) or value is default else f"text ({QUOTES})"
    if name.endswith("_n_grams"):
        return "" if _pairs(value) else "a list of [n, fraction]"
    listed = text_list(value)
    if not listed and not (value is default is None):
        return f"a string or a list of strings, at least one ({QUOTES})"
    return "" if allowed is None or set(listed or ()) <= set(allowed) else f"some of {', '.join(allowed)}"


def _within(value: Any, allowed: Range) -> bool:
    if value is None:
        return allowed.off
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return False
    fits = allowed.low <= value <= allowed.high
    return fits and (not allowed.whole or (math.isfinite(value) and value == int(value)))


def _words(allowed: Range) -> str:
    what = "a whole number" if allowed.whole else "a number"
    if allowed.high == math.inf:
        return f"{what} of at least {allowed.low:g}"
    return f"{what} from {allowed.low:g} to {allowed.high:g}"


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 and _pair(*one) for one in value)


def _pair(n: Any, fraction: Any) -> bool:
    return _within(n, Range(1, whole=True)) and _within(fraction, Range(0, 1))
