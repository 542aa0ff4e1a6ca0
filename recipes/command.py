"""What every command line here has in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


def command_parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m COMMAND` whose help is the module's docstring, examples last.

    Args:
        doc: text, then "Examples:" with one command a line.
    """
    description, _, examples = (doc or "").partition("Examples:")
    return argparse.ArgumentParser(
        f"python -m {command}",
        description=description,
        epilog=f"Examples:{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def exit_status(command: Callable[[], int | None], interrupted: str = "stopped") -> int:
    """Run a command; bad input and Ctrl-C become one line on stderr.

    Args:
        command: does the work; returns an exit status, None being 0.
        interrupted: what to say after Ctrl-C: what is kept, how to go on.

    Returns:
        The command's status; 2 after a ValueError (ConfigError is one), 130 after Ctrl-C.
    """
    try:
        return command() or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130
