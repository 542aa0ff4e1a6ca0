"""A progress bar that counts optimizer steps."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar


class StepProgress(ProgressBar):
    """One line: step, loss, tokens/s, time left. On a terminal it is rewritten in place, elsewhere printed rarely.

    Args:
        every_seconds: least time between two lines where the output is no terminal.
    """

    def __init__(self, every_seconds: float = 10.0):
        super().__init__()
        self.every_seconds = every_seconds
        self._enabled = True
        self._started = self._printed = 0.0
        self._first_step = 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._started = self._printed = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        interval = 0.5 if sys.stderr.isatty() else self.every_seconds
        now = time.monotonic()
        last = trainer.global_step == trainer.max_steps
        if now - self._printed < interval and not last:
            return
        self._printed = now
        end = "\r" if sys.stderr.isatty() and not last else "\n"
        print(self._line(trainer, pl_module, now - self._started), end=end, file=sys.stderr, flush=True)

    def _line(self, trainer: Trainer, pl_module: Any, seconds: float) -> str:
        step, total = trainer.global_step, trainer.max_steps
        left = seconds / max(1, step - self._first_step) * (total - step)
        parts = [f"step {step}/{total}"]
        for name, text in (("loss", "loss {:.4f}"), ("val_loss", "val {:.4f}"), ("tokens_per_s", "{:,.0f} tokens/s")):
            if name in pl_module.metrics:
                parts.append(text.format(pl_module.metrics[name]))
        parts.append(f"{left:.0f} s left")
        return "  ".join(parts).ljust(80)
