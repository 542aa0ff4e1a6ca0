"""Ends a run whose loss is no longer a number: the rest of its time would be wasted."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Callback, Trainer


class StopDiverged(Callback):
    """Stops training at the first logged loss that is not finite."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not math.isfinite(pl_module.metrics.get("loss", 0.0)):
            trainer.should_stop = True
