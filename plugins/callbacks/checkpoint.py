"""Checkpoints every so many steps, the newest few kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lm.errors import ConfigError
from plugins.strategies.checkpoint import MANIFEST


class PeriodicCheckpoint(Checkpoint):
    """Saves RUN/checkpoints/step-00000100 after step 100, and one at the end of the run.

    Args:
        every_n_steps: optimizer steps between saves; 0 saves only at the end.
        keep: newest checkpoints that stay; 0 keeps all.
    """

    def __init__(self, every_n_steps: int = 1000, keep: int = 2):
        if every_n_steps < 0 or keep < 0:
            raise ConfigError("checkpoint: every_n_steps and keep must not be negative")
        self.every_n_steps = every_n_steps
        self.keep = keep

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        whole_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if whole_step and self.every_n_steps > 0 and step % self.every_n_steps == 0 and step != trainer.max_steps:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == trainer.max_steps:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Save now; every rank must call it."""
        folder = Path(trainer.default_root_dir) / "checkpoints"
        path = folder / f"step-{trainer.global_step:08d}"
        if trainer.strategy.broadcast((path / MANIFEST).exists()):
            return  # a resumed run that has nothing left to do
        trainer.save_checkpoint(path, weights_only=False)
        for logger in trainer.loggers:
            logger.save()  # what was measured before the checkpoint must outlive a crash after it
        if trainer.is_global_zero and self.keep > 0:
            for old in sorted(folder.glob("step-*"))[: -self.keep]:
                trainer.strategy.remove_checkpoint(old)
