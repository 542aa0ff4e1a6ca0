"""Lightning's Trainer with two more words for `precision`, and with what keeps a run alive."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.runtime import choose, machine_of
from plugins.callbacks import run_lock
from plugins.callbacks.checkpoint import SavingCallback
from plugins.callbacks.data_check import DataCheck
from plugins.callbacks.heartbeat import Heartbeat
from plugins.callbacks.progress import StepProgress
from plugins.callbacks.resume import Resume
from plugins.callbacks.stop import StopSignals
from plugins.strategies.portable import PRECISIONS
from recipes.checks import is_child_rank

NAMES = ("auto", *PRECISIONS, "fp8")


class RecipeTrainer(Trainer):
    """See Lightning's Trainer. Signals, the choice of a checkpoint to continue from, a look at the data's hashes and
    the watch over the other ranks are always there: plugins.callbacks.stop, resume, data_check and heartbeat.

    Args:
        precision: auto (chosen by size of the model and by machine, see lm.runtime), 32-true, bf16-mixed, or fp8:
            bf16-mixed with the blocks' matrix products in FP8 (plugins.precision.float8).
        plugins: as of Lightning's Trainer; a precision plugin here needs precision to be null.
    """

    def __init__(self, *, precision: str | None = None, plugins: Any = None, **kwargs: Any) -> None:
        self.choice = ""  # why this precision and compilation, where the recipe chose
        self.known = False  # whether the run was there when its config was read
        if precision == "fp8":
            from plugins.precision.float8 import Float8

            given = plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]
            precision, plugins = None, [*given, Float8()]
        kwargs["callbacks"] = settle_callbacks(kwargs.get("callbacks"))
        if kwargs.get("enable_progress_bar") is not False and not kwargs.get("barebones"):
            kwargs["callbacks"] = with_progress(kwargs["callbacks"])
        try:
            super().__init__(precision=precision, plugins=plugins, **kwargs)  # type: ignore[arg-type]
        except RuntimeError as error:
            twice = re.search(r"more than one stateful callback of type `(\w+)`", str(error))
            if twice is None:
                raise
            raise ConfigError(f"trainer.callbacks names {twice[1]} twice; keep one") from None
        self._signal_connector: Any = StopSignals(self)
        self.resume = Resume(self)
        trainer: Any = self
        trainer.callbacks[:0] = [DataCheck(), self.resume, Heartbeat()]

    def _teardown(self) -> None:
        """Also after an exception; loggers have said their last by now."""
        super()._teardown()
        run_lock.release(Path(self.default_root_dir))


def settle_callbacks(callbacks: Any) -> list[Any]:
    """The callbacks of a run: of several that save checkpoints the last one, which is said in one line.

    Each of them removes old checkpoints by its own rules: two would remove what the other keeps for good.
    """
    given = callbacks if isinstance(callbacks, list) else [] if callbacks is None else [callbacks]
    saving = [callback for callback in given if isinstance(callback, SavingCallback)]
    if len(saving) < 2:
        return list(given)
    if not is_child_rank():
        last = type(saving[-1]).__name__
        print(f"note: of {len(saving)} callbacks that save checkpoints the last one counts: {last}", file=sys.stderr)
    return [callback for callback in given if callback is saving[-1] or callback not in saving]


def with_progress(callbacks: list[Any]) -> list[Any]:
    """With the recipe's lines of progress where none are configured; Lightning would draw a bar without a loss."""
    shown = any(isinstance(callback, ProgressBar) for callback in callbacks)
    return callbacks if shown else [*callbacks, StepProgress()]


def check_precision(name: str | None) -> None:
    """Raise ConfigError for a precision that the strategies do not have; None leaves it to a plugin."""
    if name is not None and str(name) not in NAMES:
        raise ConfigError(f"trainer.precision {name} is not supported; use {', '.join(NAMES[:-1])} or {NAMES[-1]}")


def settle(precision: str | None, compiled: Any, model: ModelConfig, run_flops: float, device: str) -> tuple[Any, ...]:
    """What 'auto' means for trainer.precision and model.runtime.compile.

    Args:
        compiled: model.runtime.compile: auto, true or false.
        run_flops: of the run; 0 where nothing is trained.
        device: cpu or cuda.

    Returns:
        (precision, compile, line): the line says what was picked and why; empty where nothing was left open.
    """
    if precision != "auto" and compiled != "auto":
        return precision, compiled, ""
    choice = choose(model, run_flops, machine_of(device))
    precision = choice.precision if precision == "auto" else precision
    compiled = choice.compile if compiled == "auto" else compiled
    kind = "compiled blocks" if compiled else "no compilation"
    return precision, compiled, f"picked {precision}, {kind}: {choice.reason}"


def device_of(accelerator: Any) -> str:
    """cpu or cuda, as trainer.accelerator means here."""
    import torch

    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available()):
        return "cuda"
    return "cpu" if accelerator == "auto" else str(accelerator)
