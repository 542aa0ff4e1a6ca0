"""Which code this is. Importing it costs nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_commit() -> str:
    """Commit of the code, with '+changes' where the tree differs from it; 'unknown' outside a checkout."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changes else "")
