"""How a trial that may be stopped early reports on the way, and is ended: one training at a time in a process."""

from __future__ import annotations

import queue
import threading
from typing import Any

from lightning.pytorch import Callback, Trainer

from lm.errors import RunStopped
from plugins.callbacks.step_end import ends_step
from plugins.loggers.sweep_ledger import STOPPED


class StoppedEarly(RunStopped):
    """The scheduler ended this trial: it lost to others at the same step."""

    status = STOPPED


class Channel:
    """Between the thread that trains and the one that answers Ray: the training waits at each report for its answer."""

    def __init__(self) -> None:
        self.reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answer = threading.Semaphore(0)
        self._stop = False

    def report(self, values: dict[str, Any]) -> None:
        """Hand over and wait.

        Raises:
            StoppedEarly: the answer was to stop.
        """
        self.reports.put(values)
        self._answer.acquire()
        if self._stop:
            raise StoppedEarly(f"stopped early at step {values['step']} of {values['steps']}, by the losses of others")

    def answer(self, stop: bool) -> None:
        """Let the training go on, or end."""
        self._stop = self._stop or stop
        self._answer.release()


# Of the training that runs in this process; a callback is made from a config and cannot be handed an object.
current: Channel | None = None


class ReportLoss(Callback):
    """Reports the mean training loss of the last `every` steps, with its step, to `current`; never the last step."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.append(float(outputs["loss"]))
        step, steps = trainer.global_step, trainer.max_steps
        if not ends_step(trainer, batch_idx) or step % self.every or step >= steps or current is None:
            return
        mean = sum(self._losses) / len(self._losses)
        self._losses = []
        run_id = trainer.loggers[0].version if trainer.loggers else None
        current.report({"step": step, "steps": steps, "loss": mean, "run_id": run_id})
