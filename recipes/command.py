"""What every command line here has in common."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

_OWN = ("lm", "plugins", "recipes", "sweeps")


class Help(argparse.RawDescriptionHelpFormatter):
    """Text as it is written; the default of each option that has one, unless its own words name it."""

    def add_argument(self, action: argparse.Action) -> None:
        default = action.default
        none = default is None or default is False or default in ("", [], argparse.SUPPRESS)
        if not none and action.help != argparse.SUPPRESS and "default" not in (action.help or ""):
            values = default if isinstance(default, list) else [default]
            shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            action.help = f"{action.help} (default {shown})" if action.help else f"default {shown}"
        super().add_argument(action)


def command_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m COMMAND` whose help is the module's docstring, examples last.

    Args:
        doc: text, then "Examples:" with one command a line.
    """
    return argparse.ArgumentParser(f"python -m {command}", **split_help(doc), formatter_class=Help)


def split_help(doc: str | None) -> dict[str, Any]:
    """A parser's description and epilog: a text, and what it has from "Examples:" on."""
    description, _, examples = (doc or "").partition("Examples:")
    return {"description": description, "epilog": f"Examples:{examples}" if examples else None}


def exit_status(command: Callable[[], int | None], interrupted: str = "stopped") -> int:
    """Run a command; bad input and Ctrl-C become one line on stderr.

    Args:
        command: does the work; returns an exit status, None being 0.
        interrupted: what to say after Ctrl-C: what is kept, how to go on.

    Returns:
        The command's status; 2 after a ValueError (ConfigError is one), a file that cannot be read or written, a
        package that is missing, or an answer of MLflow that is an error; 130 after Ctrl-C; 141 when whoever read the
        output has gone (`| head`).
    """
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  or the interpreter complains once more when it ends
        return 141
    except Exception as error:
        words = _words(error)
        if words is None:
            raise
        print(f"error: {words}", file=sys.stderr)
        return 2


def _words(error: Exception) -> str | None:
    """One line for what the caller can mend; None for an error in the program."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] not in _OWN:
        name = error.name.split(".")[0]
        if find_spec(name) is not None:
            return None  # a part of it: another version than this one was written for
        return f"the package {name} is not installed; install it, or all that is needed: pip install 'scalewright[dev]'"
    mlflow = sys.modules.get("mlflow.exceptions")  # not imported here: most commands do without
    if mlflow is not None and isinstance(error, mlflow.MlflowException):
        return f"MLflow: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return None
