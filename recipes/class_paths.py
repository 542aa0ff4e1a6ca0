"""Which classes a config may name: those of this project and its dependencies, and only where their type fits."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from lm.errors import ConfigError

# A module of anywhere else is not even imported: a file that happens to lie in the current folder would be run by that.
ALLOWED = ("lm", "plugins", "recipes", "sweeps", "tests", "lightning", "torch", "torchao", "deepspeed", "mlflow", "ray")

_DENIED = re.compile(r"Importing '([^']+)' is not allowed")
_NO_SUBCLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\S+)")
_PROBLEM = re.compile(r"Problem with given class_path '([^']+)': (.+?)(?: - |$)")
_UNION = "Does not validate against any of the Union subtypes"
_END = re.compile(r"; for the options run| - Not a valid subclass| - Expected a <class 'NoneType'>| Given value type")


def restrict() -> None:
    """Let jsonargparse import nothing for a value of a config but what is in ALLOWED. Safe to call again."""
    from jsonargparse import set_parsing_settings

    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=list(ALLOWED))


def check_class(key: str, value: Any, base: type) -> None:
    """Refuse a class where Lightning takes anything and would find out late, or build it first.

    Args:
        key: of the config, for the message.
        value: as parsed; whatever names no class passes.
        base: class that the named one must derive from.

    Raises:
        ConfigError: it does not.
    """
    class_path = value.get("class_path") if hasattr(value, "get") else None
    if class_path is None:
        return
    module, _, name = class_path.rpartition(".")
    named = getattr(import_module(module), name)  # jsonargparse has imported it already
    if not (isinstance(named, type) and issubclass(named, base)):
        raise ConfigError(f"{key}: class_path {class_path} is refused: it is no subclass of {base.__name__}")


def shorten(message: str) -> str:
    """What jsonargparse says of a class path, in a line a reader can take in; other messages as they are."""
    key = re.match(r'Parser key "([^"]+)"', message)
    where = f"{key[1]}: " if key else ""
    if found := _DENIED.search(message):
        return (
            f"{where}class_path {found[1]} is refused: neither of this project nor of its dependencies; put the class "
            "into plugins/"
        )
    if found := _NO_SUBCLASS.search(message):
        return f"{where}class_path {found[1]} is refused: it is no subclass of {found[2]}"
    if found := _PROBLEM.search(message):
        return f"{where}class_path {found[1]} cannot be used: {found[2]}"
    return _innermost(message) if _UNION in message else message


def said_by_class(message: str) -> str | None:
    """What a class raised when it was built, out of what jsonargparse tells of all types that a key may have; None for
    other messages."""
    if _UNION not in message:
        return None
    reasons = re.findall(
        r"^ +- (?!Expected a |Does not validate |Not a valid |a class path|a dict )(.+)", message, re.MULTILINE
    )
    if not reasons:
        return None
    null = "; a value is null that must not be" if "NoneType" in reasons[0] else ""
    named = re.findall(r"class_path='([\w.]+)'", message) if null else []
    return f"{named[0]}: {reasons[0]}{null}" if named else reasons[0]


def _innermost(message: str) -> str:
    """Of a value that is none of the types a key may have, jsonargparse tells about each type: keep the first, which
    is the one that is meant."""
    keys, rest = [], message
    while True:
        if key := re.match(r'Parser key "([^"]+)": ?', rest):
            keys.append(key[1])
            rest = rest[key.end() :]
        elif rest.startswith("- Expected a path but ") and _UNION in rest:
            rest = rest[rest.index(_UNION) :]
        elif rest.startswith(_UNION) and " Errors: - " in rest:
            rest = rest.partition(" Errors: - ")[2]
        else:
            break
    given = re.search(r"Given value: (.*?)(?:; for the options run|$)", rest)
    reason = _END.split(rest)[0]
    wrong = re.findall(r"\{'class_path': '([\w.]+)'", message)  # what was accepted is a Namespace by now
    inside = f" ({wrong[-1]})" if wrong else ""
    got = f", got {given[1]}" if given and len(given[1]) < 80 and given[1] not in reason else ""
    return f"{'.'.join(keys)}{inside}: {reason.rstrip()}{got}"
