"""Writing result files."""

from __future__ import annotations

from pathlib import Path

from lm.data.files import write_bytes


def write_text(path: Path, text: str) -> None:
    """Write aside, then rename; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())
