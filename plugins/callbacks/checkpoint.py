"""Checkpoints every so many steps, the newest few kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lm.errors import ConfigError
from plugins.strategies.background import InBackground
from plugins.strategies.checkpoint import MANIFEST, remove


class PeriodicCheckpoint(Checkpoint):
    """Saves RUN/checkpoints/step-00000100 after step 100, and one at the end of the run.

    Args:
        every_n_steps: optimizer steps between saves; 0 saves only at the end.
        keep: newest checkpoints that stay; 0 keeps all.
        asynchronous: copy the state to CPU memory (as many bytes as the checkpoint has) and write it while training
            goes on; the next save waits for it. A save that fails is reported and the run goes on with the older
            checkpoints. The one at the end of the run is written at once, and raises.
    """

    def __init__(self, every_n_steps: int = 1000, keep: int = 2, asynchronous: bool = False):
        if every_n_steps < 0 or keep < 0:
            raise ConfigError("checkpoint: every_n_steps and keep must not be negative")
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.asynchronous = asynchronous

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        whole_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if whole_step and self.every_n_steps > 0 and step % self.every_n_steps == 0 and step != trainer.max_steps:
            self.save(trainer, self.asynchronous)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == trainer.max_steps:
            self.save(trainer)

    def save(self, trainer: Trainer, asynchronous: bool = False) -> None:
        """Save now; every rank must call it."""
        folder = Path(trainer.default_root_dir) / "checkpoints"
        path = folder / f"step-{trainer.global_step:08d}"
        if trainer.strategy.broadcast((path / MANIFEST).exists()):
            return  # a resumed run that has nothing left to do
        for logger in trainer.loggers:
            logger.save()  # what was measured before the checkpoint must outlive a crash after it
        if asynchronous:
            trainer.save_checkpoint(path, False, InBackground(then=lambda: self._prune(folder)))
            return
        trainer.save_checkpoint(path, False)
        if trainer.is_global_zero:
            self._prune(folder)

    def _prune(self, folder: Path) -> None:
        """Remove all but the newest; on rank 0, once a newer one is complete."""
        for old in sorted(folder.glob("step-*"))[: -self.keep] if self.keep > 0 else []:
            remove(old)
