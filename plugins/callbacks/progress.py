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
        self._first_step = -1

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
        if now - self._printed < interval or trainer.global_step == trainer.max_steps:
            return  # the last step's line waits for its validation
        self._printed = now
        end = "\r" if sys.stderr.isatty() else "\n"
        seconds = now - self._started
        left = seconds / max(1, trainer.global_step - self._first_step) * (trainer.max_steps - trainer.global_step)
        print(self._line(trainer, pl_module, f"{left:.0f} s left"), end=end, file=sys.stderr, flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """The last line: final losses, and where the run is."""
        if self._enabled and trainer.is_global_zero and trainer.global_step > self._first_step:
            line = self._line(trainer, pl_module, f"{time.monotonic() - self._started:.0f} s")
            print(f"{line}\nrun {trainer.default_root_dir}", file=sys.stderr, flush=True)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """A run that was complete before it began says so, instead of nothing."""
        complete = stage == "fit" and self._first_step < 0 and 0 < trainer.max_steps <= trainer.global_step
        if complete and self._enabled and trainer.is_global_zero:
            step = f"step {trainer.global_step}/{trainer.max_steps}"
            print(f"{step}: complete, nothing to do\nrun {trainer.default_root_dir}", file=sys.stderr, flush=True)

    def _line(self, trainer: Trainer, pl_module: Any, time_text: str) -> str:
        step, total = trainer.global_step, trainer.max_steps
        parts = [f"step {step}/{total}"]
        for name, text in (("loss", "loss {:.4f}"), ("val_loss", "val {:.4f}"), ("tokens_per_s", "{:,.0f} tokens/s")):
            if name in pl_module.metrics:
                parts.append(text.format(pl_module.metrics[name]))
        parts.append(time_text)
        return "  ".join(parts).ljust(80)
