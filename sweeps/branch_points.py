"""Checkpoints of a trunk: those that branches begin from stay, and with the last of them the trunk ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lm.errors import ConfigError
from plugins.callbacks.checkpoint import SavingCallback


class BranchPoints(SavingCallback):
    """Saves after each of `steps` for good, and every `every_n_steps` to go on from; stops the run after `last`.

    Args:
        steps: optimizer steps done where branches begin.
        last: steps after which the trunk ends.
        every_n_steps: optimizer steps between other saves; only the newest of these stays. 0: none.
    """

    def __init__(self, steps: list[int], last: int, every_n_steps: int = 0) -> None:
        if not steps or min(steps) < 1 or last < 1 or every_n_steps < 0:
            raise ConfigError("branch_points: steps and last must be positive, every_n_steps not negative")
        super().__init__(keep=1)
        self.steps = frozenset(steps)
        self.last = last
        self.every_n_steps = every_n_steps

    def is_due(self, trainer: Trainer) -> bool:
        step = trainer.global_step
        return step in self.steps or (self.every_n_steps > 0 and step % self.every_n_steps == 0)

    def _after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super()._after_step(trainer, pl_module)
        if trainer.global_step >= self.last:
            trainer.should_stop = True

    def _permanent(self, trainer: Trainer) -> Any:
        return lambda paths: {path for path in paths if step_of(path) in self.steps}


def step_of(path: Path) -> int:
    """Steps done of a checkpoint step-00000100."""
    return int(path.name.rpartition("-")[2])


def checkpoint_at(folder: Path, step: int) -> Path:
    """Where a run's checkpoint after `step` steps is."""
    return folder / f"step-{step:08d}"
