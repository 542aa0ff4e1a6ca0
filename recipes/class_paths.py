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
    return message
