"""Ends a run whose loss is no longer a number: the rest of its time would be wasted."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, Trainer


class StopDiverged(Callback):
    """Stops training at the first logged loss that is not finite. `diverged` says whether that happened."""

    def __init__(self) -> None:
        self.diverged = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = pl_module.metrics.get("loss", 0.0)
        if not math.isfinite(loss):
            self.diverged = True
            trainer.should_stop = True
