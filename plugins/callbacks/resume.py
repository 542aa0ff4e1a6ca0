"""Where a run goes on: from the newest checkpoint that is sound, with the validation that a kill may have cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lm.errors import ConfigError
from plugins.callbacks import branch, rewind, roll_backs, run_lock
from plugins.callbacks.checkpoint import SavingCallback, tell
from plugins.callbacks.spike_guard import SpikeGuard
from plugins.strategies import checkpoint, leftovers


class Resume(Callback):
    """Part of every RecipeTrainer.

    All ranks choose the checkpoint together, in setup: rank 0 lists them, every rank hashes its share of the files,
    and one that is torn or damaged is told of in one line, set aside (fit only) and never deleted.

    A checkpoint is written before the validation of its step. When the run was killed in between, that validation is
    done first, so that a run has the same metrics however often it was restarted.

    Attributes:
        folder: where to look for the newest checkpoint; None: only what trainer.fit(ckpt_path=...) says is loaded.
        path: what was chosen; None for the beginning.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.folder: Path | None = None
        self.path: Path | None = None
        self._given: Any = None  # what trainer.fit(ckpt_path=...) says
        self._validated_step = -1
        connector: Any = trainer._checkpoint_connector
        start, select = connector.resume_start, connector._select_ckpt_path

        def select_ckpt_path(*args: Any, **kwargs: Any) -> Any:
            self._given = select(*args, **kwargs)
            return self._given

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            start(checkpoint_path if checkpoint_path is not None else self.path, weights_only)

        connector.resume_start, connector._select_ckpt_path = resume_start, select_ckpt_path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._validate_first(trainer)
        if self.folder is not None:
            self._find(trainer, fitting)
        if fitting:
            self._check_length(trainer)

    def _find(self, trainer: Trainer, fitting: bool) -> None:
        assert self.folder is not None
        if fitting and self.folder.parent.is_dir():
            # Before anything there is set aside or deleted: it may be another process's.
            problem = run_lock.hold(self.folder.parent) if trainer.is_global_zero else None
            problem = trainer.strategy.broadcast(problem)
            if problem is not None:
                raise ConfigError(problem)
        if fitting and trainer.is_global_zero:
            leftovers.clean(self.folder)
        self.path = choose(trainer, self.folder, set_aside=fitting)
        if self.path is None and not fitting:
            raise ConfigError(f"{self.folder} holds no checkpoint; train the run first, or pass another --ckpt_path")

    def _check_length(self, trainer: Trainer) -> None:
        path = self._given or self.path
        if path is None:
            return
        own, steps = SavingCallback.folder(trainer), trainer.max_steps
        problem = branch.nothing_left(Path(path), own, steps) if trainer.is_global_zero else None
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise ConfigError(problem)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._leave_branch(trainer)
        if not any(isinstance(callback, SpikeGuard) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            roll_backs.keep_dropped(trainer)

    def _leave_branch(self, trainer: Trainer) -> None:
        """On rank 0: what the run's folder and its loggers hold of later steps does not count any more."""
        step = trainer.global_step

        def forget() -> None:
            for logger in trainer.loggers:
                if hasattr(logger, "rewind"):
                    logger.rewind(step)
                    logger.save()
            roll_backs.forget(trainer)

        for path in branch.leave(SavingCallback.folder(trainer), step, forget):
            tell(trainer, f"warning: this run begins at step {step}; a later checkpoint is renamed to {path}")

    # The validation that is missing ---------------------------------------------------------------------------------

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"validated_step": self._validated_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated_step = int(state_dict["validated_step"])

    def _validate_first(self, trainer: Trainer) -> None:
        """Before the first step: validate, where the step that was resumed at is one to validate at and was not."""
        loop: Any = trainer.fit_loop.epoch_loop
        run_start = loop.on_run_start

        def on_run_start(data_fetcher: Any) -> None:
            run_start(data_fetcher)
            own = self.path is not None and trainer.global_step > max(self._validated_step, 0)
            if own and loop._should_check_val_fx(data_fetcher):
                trainer.validating = True
                loop.val_loop._restarting = False
                loop.val_loop.run()
                trainer.training = True

        if not hasattr(loop, "validates_first"):
            loop.validates_first = True
            loop.on_run_start = on_run_start


def choose(trainer: Trainer, folder: Path, set_aside: bool) -> Path | None:
    """The newest complete checkpoint in a folder whose files have their sha256, or None where there is none at all.

    Collective.

    Args:
        set_aside: rename what is damaged (see checkpoint.set_aside), so that training can save there again.

    Raises:
        ConfigError: on all ranks; there are checkpoints, and none is sound.
    """
    paths: list[Path] = trainer.strategy.broadcast(checkpoint.candidates(folder) if trainer.is_global_zero else [])
    found = rewind.first_sound(paths, lambda problem: tell(trainer, f"warning: {problem}"), set_aside)
    if paths and found is None:
        raise ConfigError(f"{folder}: none of its {len(paths)} checkpoints is sound; start a new run, or mend one")
    return found
