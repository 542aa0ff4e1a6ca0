"""Checkpoints every so many steps, the newest few kept. A save that fails never stops a run before its end."""

from __future__ import annotations

import math
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lm.errors import ConfigError
from plugins.callbacks.step_end import after_step
from plugins.strategies.background import InBackground
from plugins.strategies.checkpoint import MANIFEST, CheckpointError, candidates, remove

_LONGEST_BACKOFF = 8  # intervals from one attempt to the next


class SavingCallback(Checkpoint, ABC):
    """What callbacks share that save RUN/checkpoints/step-00000100 after step 100, and one at the end of the run.

    A save that fails (a full disk, a folder that is read-only) is told in one line and training goes on; the next
    attempts come 1, 2, 4 and at last 8 intervals apart. At the end of the run there is no later: the save is tried
    again for `final_retry_seconds`, and then the run fails.

    Args:
        keep: newest checkpoints that stay; 0 keeps all.
        asynchronous: copy the state to CPU memory (as many bytes as the checkpoint has) and write it while training
            goes on; the next save waits for it. The save at the end of the run is written at once.
        permanent_every_tokens: the first checkpoint at or after each multiple of so many training tokens stays for
            good; 0 for none.
        final_retry_seconds: how long the save at the end of the run is tried.
    """

    def __init__(
        self,
        keep: int = 2,
        asynchronous: bool = False,
        permanent_every_tokens: float = 0,
        final_retry_seconds: float = 60.0,
    ) -> None:
        counts = {"permanent_every_tokens": permanent_every_tokens, "final_retry_seconds": final_retry_seconds}
        for name, value in {"keep": keep, **counts}.items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"checkpoint: {name} must be finite and not negative, got {value}")
        self.keep = keep
        self.asynchronous = asynchronous
        self.permanent_every_tokens = permanent_every_tokens
        self.final_retry_seconds = final_retry_seconds
        self._saved_step = -1
        self._failures = self._pass_over = self._known_failures = 0

    @abstractmethod
    def is_due(self, trainer: Trainer) -> bool:
        """Whether to save after this step; the same on all ranks."""

    def pass_over(self, trainer: Trainer) -> None:
        """A save was due and is left out, because those before it failed."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            after_step(trainer, self, self._after_step)

    def _after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == trainer.max_steps or not self.is_due(trainer):
            return
        self._count_background_failures(trainer)
        if self._pass_over > 0:
            self._pass_over -= 1
            self.pass_over(trainer)
        else:
            self.try_to_save(trainer, self.asynchronous)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == trainer.max_steps:
            self._save_at_last(trainer)

    def try_to_save(self, trainer: Trainer, asynchronous: bool = False) -> bool:
        """Save now; every rank must call it. False when that failed, which is told in one line."""
        try:
            self.save(trainer, asynchronous)
        except CheckpointError as error:
            self._back_off()
            tell(trainer, f"warning: {error}; the run goes on, older checkpoints stay")
            return False
        if not asynchronous:
            self._failures = 0
        return True

    def save(self, trainer: Trainer, asynchronous: bool = False) -> None:
        """Save now; every rank must call it.

        Raises:
            CheckpointError: on all ranks, when any rank failed.
        """
        folder = self.folder(trainer)
        path = folder / f"step-{trainer.global_step:08d}"
        here = trainer.global_step == self._saved_step and (path / MANIFEST).exists()
        if trainer.strategy.broadcast(here):
            return  # this very state is there already
        for logger in trainer.loggers:
            logger.save()  # what was measured before the checkpoint must outlive a crash after it
        permanent = self._permanent(trainer)
        if asynchronous:
            trainer.save_checkpoint(path, False, InBackground(then=lambda: self._prune(folder, permanent)))
        else:
            trainer.save_checkpoint(path, False)
            if trainer.is_global_zero:
                self._prune(folder, permanent)
        self._saved_step = trainer.global_step

    def went_back(self) -> None:
        """After a roll-back: what was saved is of a branch given up, also where its folder could not be removed."""
        self._saved_step = -1

    @staticmethod
    def folder(trainer: Trainer) -> Path:
        """Where the checkpoints of a run are."""
        return Path(trainer.default_root_dir) / "checkpoints"

    # Failures -------------------------------------------------------------------------------------------------------

    def _back_off(self) -> None:
        self._failures += 1
        self._pass_over = min(1 << (self._failures - 1), _LONGEST_BACKOFF) - 1

    def _count_background_failures(self, trainer: Trainer) -> None:
        """Saves that failed in the background since the last look, once the one under way is over."""
        saver = getattr(trainer.strategy, "saver", None)
        if saver is None or not self.asynchronous or self._pass_over > 0:
            return
        saver.wait()  # the next save would as well; and now all ranks know the same
        if saver.failures > self._known_failures:
            self._back_off()
        elif self._saved_step >= 0:
            self._failures = 0
        self._known_failures = saver.failures

    def _save_at_last(self, trainer: Trainer) -> None:
        """The save at the end of the run. Raises CheckpointError when it failed for final_retry_seconds."""
        deadline = time.monotonic() + self.final_retry_seconds
        pause = 1.0
        while True:
            try:
                return self.save(trainer)
            except CheckpointError as error:
                if not trainer.strategy.broadcast(time.monotonic() + pause < deadline):
                    newest = next((path.name for path in candidates(self.folder(trainer))), "none")
                    raise CheckpointError(
                        f"{error}; gave up after {self.final_retry_seconds:g} s: the end of the run is kept nowhere, "
                        f"the newest checkpoint is {newest}; make room and continue with --ckpt_path last"
                    ) from None
                tell(trainer, f"warning: {error}; trying again in {pause:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 15.0)

    # Older checkpoints ----------------------------------------------------------------------------------------------

    def _prune(self, folder: Path, permanent: Any) -> None:
        """Remove all but the newest and the permanent ones; on rank 0, once a newer one is complete."""
        old = sorted(folder.glob("step-*"))
        stays = permanent(old)
        for path in old[: -self.keep] if self.keep > 0 else []:
            if path not in stays:
                try:
                    remove(path)
                except OSError as error:  # a disk that cannot delete must not fail a save that is complete
                    print(f"warning: cannot remove {path}: {error.strerror}", file=sys.stderr)

    def _permanent(self, trainer: Any) -> Any:
        """Which of a run's checkpoints stay: the first in each span of permanent_every_tokens, but not in the first."""
        every = self.permanent_every_tokens
        if every <= 0:
            return lambda paths: set()

        def first_of_spans(paths: list[Path]) -> set[Path]:
            spans: dict[int, Path] = {}
            for path in paths:  # in the order of their steps
                span = int(trainer.datamodule.plan.ramp.tokens(int(path.name.rpartition("-")[2])) // every)
                spans.setdefault(span, path)
            return {path for span, path in spans.items() if span > 0}

        return first_of_spans


class PeriodicCheckpoint(SavingCallback):
    """Saves every so many steps, and at the end of the run.

    Args:
        every_n_steps: optimizer steps between saves; 0 saves only at the end.
        keep, asynchronous, permanent_every_tokens, final_retry_seconds: see SavingCallback.
    """

    def __init__(
        self,
        every_n_steps: int = 1000,
        keep: int = 2,
        asynchronous: bool = False,
        permanent_every_tokens: float = 0,
        final_retry_seconds: float = 60.0,
    ):
        if every_n_steps < 0:
            raise ConfigError("checkpoint: every_n_steps and keep must not be negative")
        super().__init__(keep, asynchronous, permanent_every_tokens, final_retry_seconds)
        self.every_n_steps = every_n_steps

    def is_due(self, trainer: Trainer) -> bool:
        return self.every_n_steps > 0 and trainer.global_step % self.every_n_steps == 0


def saving_callback(trainer: Trainer) -> SavingCallback:
    """The trainer's own callback that saves, else one that saves only when asked to."""
    own = [callback for callback in trainer.callbacks if isinstance(callback, SavingCallback)]  # type: ignore[attr-defined]
    return own[0] if own else PeriodicCheckpoint(every_n_steps=0, keep=0)


def tell(trainer: Trainer, line: str) -> None:
    """One line on rank 0's stderr."""
    if trainer.is_global_zero:
        print(line, file=sys.stderr, flush=True)
