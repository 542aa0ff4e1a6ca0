"""Tokens, tokens per second and FLOPs done."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback

from lm.data.flops import flops_until
from plugins.callbacks.step_end import due


class Throughput(Callback):
    """Records tokens, flops (lm.plan's default convention) and tokens_per_s at every logged step.

    The clock stands still during validation.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0
        self._since: float | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._tokens += batch["input_ids"].numel() - batch.get("padding", 0)
        step = trainer.global_step
        if not due(trainer, batch_idx, trainer.log_every_n_steps):
            return
        self._pause()
        data = trainer.datamodule
        pl_module.record(
            {
                "tokens": data.tokens_trained(step),
                "flops": flops_until(pl_module.model_config, data.plan, step),
                "tokens_per_s": self._tokens * trainer.strategy.data_parallel[1] / max(self._seconds, 1e-9),
            }
        )
        self._seconds, self._tokens, self._since = 0.0, 0, time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._pause()

    def _pause(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        self._since = None
