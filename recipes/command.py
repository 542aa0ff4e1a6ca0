"""What every command line here has in common."""

from __future__ import annotations

import argparse


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
