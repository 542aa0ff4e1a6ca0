"""Checkpoints as often as pays: the interval follows from what a save costs and how often the run breaks."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lm.errors import ConfigError
from lm.planner.reliability import mean_seconds_between_failures, young_interval_seconds
from plugins.callbacks.checkpoint import SavingCallback
from plugins.callbacks.uptime import Uptime


class YoungCheckpoint(SavingCallback):
    """Saves every sqrt(2 delta M) seconds, counted in steps, and at the end of the run.

    delta is the time for which training stands still in a save (with `asynchronous` only until the state is copied),
    the median of the last few; M is mean_seconds_between_failures. Both are measured on rank 0, which tells the others
    the next step to save after. Recorded after each save: checkpoint/blocked_seconds, checkpoint/mtbf_seconds and
    checkpoint/interval_steps.

    Args:
        failures_per_device_day: 5e-4 is what Llama 3 met: 419 unexpected interruptions in 54 days on 16,384 GPUs
            (Grattafiori et al. 2024, arXiv 2407.21783, sec. 3.3.4).
        first_step: step of the first save, from which on delta is known.
        max_interval_seconds: an interval is never longer, whatever the formula says.
        time_limit_seconds: wall-clock limit of this process, counted from its first step; a save is made in time before
            it. null for none.
        keep, asynchronous, permanent_every_tokens, final_retry_seconds: see SavingCallback.

    Raises:
        ConfigError: a rate, interval or limit that is not positive.
    """

    def __init__(
        self,
        failures_per_device_day: float = 5e-4,
        first_step: int = 50,
        max_interval_seconds: float = 3 * 3600.0,
        time_limit_seconds: float | None = None,
        keep: int = 2,
        asynchronous: bool = False,
        permanent_every_tokens: float = 0,
        final_retry_seconds: float = 60.0,
    ) -> None:
        super().__init__(keep, asynchronous, permanent_every_tokens, final_retry_seconds)
        positive = {
            "failures_per_device_day": failures_per_device_day,
            "first_step": first_step,
            "max_interval_seconds": max_interval_seconds,
            "time_limit_seconds": 1 if time_limit_seconds is None else time_limit_seconds,
        }
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ConfigError(f"YoungCheckpoint.{name} must be positive and finite, got {value}")
        self.failures_per_device_day = failures_per_device_day
        self.first_step = first_step
        self.max_interval_seconds = max_interval_seconds
        self.time_limit_seconds = time_limit_seconds
        self.next_step = self._interval = first_step
        self._uptime: Uptime | None = None
        self._blocked: deque[float] = deque(maxlen=5)
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._began = self._last = 0.0
        self._saved_before_the_limit = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = self._last = time.monotonic()
        self.next_step = trainer.global_step + self._interval
        if trainer.is_global_zero:
            self._uptime = Uptime(Path(trainer.default_root_dir))
            self._uptime.write()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % max(1, int(trainer.accumulate_grad_batches)) == 0:
            self._last = time.monotonic()  # validation and saves are not part of a step

    def is_due(self, trainer: Trainer) -> bool:
        self._step_seconds.append(time.monotonic() - self._last)
        self.next_step = min(self.next_step, trainer.global_step + self._interval)  # after a roll-back it lies far off
        if self.time_limit_seconds is not None and not self._saved_before_the_limit:
            self._saved_before_the_limit = bool(trainer.strategy.broadcast(self._limit_is_near()))
            if self._saved_before_the_limit:
                return True
        return trainer.global_step >= self.next_step

    def _limit_is_near(self) -> bool:
        """Whether the step after next, and a save, might come too late. Read on rank 0."""
        assert self.time_limit_seconds is not None
        left = self.time_limit_seconds - (time.monotonic() - self._began)
        return left < 2 * max(self._step_seconds) + 2 * max(self._blocked, default=0.0) + min(
            60.0, 0.05 * self.time_limit_seconds
        )

    def try_to_save(self, trainer: Trainer, asynchronous: bool = False) -> bool:
        began = time.monotonic()
        saved = super().try_to_save(trainer, asynchronous)
        if saved:
            self._blocked.append(time.monotonic() - began)
        self._plan(trainer, saved)
        return saved

    def pass_over(self, trainer: Trainer) -> None:
        self.next_step = trainer.global_step + self._interval

    def _plan(self, trainer: Any, saved: bool) -> None:
        """Set next_step, and record why. Collective."""
        seconds, failures = (self._uptime.seconds, self._uptime.failures) if self._uptime is not None else (0.0, 0)
        between = mean_seconds_between_failures(self.failures_per_device_day, trainer.world_size, seconds, failures)
        blocked, step_seconds = median(self._blocked or [0.0]), max(median(self._step_seconds or [1.0]), 1e-6)
        interval = min(young_interval_seconds(blocked, between), self.max_interval_seconds)
        if saved:
            steps = int(trainer.strategy.broadcast(max(1, round(interval / step_seconds))))
            self._interval = steps
        self.next_step = trainer.global_step + self._interval
        if self._uptime is not None:
            self._uptime.write()
        record = getattr(trainer.lightning_module, "record", None)
        if record is not None and saved:
            facts = {"blocked_seconds": blocked, "mtbf_seconds": between, "interval_steps": self._interval}
            record({f"checkpoint/{name}": value for name, value in facts.items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._ended_as_wished()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SystemExit):  # stop.Stopped: asked for
            self._ended_as_wished()

    def _ended_as_wished(self) -> None:
        if self._uptime is not None:
            self._uptime.write(running=False)

    def state_dict(self) -> dict[str, Any]:
        return {"blocked": list(self._blocked), "interval": self._interval}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What a save costs is known from before the restart; the next one comes a whole interval after it."""
        self._blocked.extend(state_dict["blocked"])
        self._interval = int(state_dict["interval"])
