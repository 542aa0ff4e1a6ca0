"""How long a run has run and how often it broke, over all its starts. Standard library only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

FILE = "uptime.json"


class Uptime:
    """RUN/uptime.json: {"seconds": trained so far, "failures": starts that ended without saying so, "running": bool}.

    Attributes:
        seconds: of all starts together, this one included.
        failures: how often the run was found broken off; a requested stop and the end of the run are none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / FILE
        try:
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            self._before, self.failures = float(saved["seconds"]), int(saved["failures"]) + bool(saved["running"])
        except (OSError, ValueError, KeyError, TypeError):
            self._before, self.failures = 0.0, 0
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._since

    def write(self, running: bool = True) -> None:
        """Replace the file. A disk that cannot take it must not stop a run."""
        aside = self._file.with_name(f".{FILE}.tmp")
        text = json.dumps({"seconds": round(self.seconds, 3), "failures": self.failures, "running": running})
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, self._file)
        except OSError:
            return
