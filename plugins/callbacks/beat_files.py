"""Shows from outside that a rank still works."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback


class BeatFiles(Callback):
    """Touches `folder`/rank_N before and after each batch, of training and of validation.

    A rank that waits for another one in a collective does not beat either: a job whose newest beat is old is hung.

    Args:
        folder: made when missing.
        every_seconds: least time between two beats.
    """

    def __init__(self, folder: str, every_seconds: float = 0.5):
        self.folder = Path(folder)
        self.every_seconds = every_seconds
        self._beat_at = 0.0

    def _beat(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        if now - self._beat_at < self.every_seconds:
            return
        self._beat_at = now
        with contextlib.suppress(OSError):  # a full disk is not the end of a run
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank_{trainer.global_rank}").touch()

    on_train_batch_start = on_train_batch_end = _beat
    on_validation_batch_start = on_validation_batch_end = _beat
