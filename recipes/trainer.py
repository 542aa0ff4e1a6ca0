"""Lightning's Trainer with two more words for `precision`, and with what keeps a run alive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.runtime import choose, machine_of
from plugins.callbacks import run_lock
from plugins.callbacks.heartbeat import Heartbeat
from plugins.callbacks.resume import Resume
from plugins.callbacks.stop import StopSignals
from plugins.strategies.portable import PRECISIONS

NAMES = ("auto", *PRECISIONS, "fp8")


class RecipeTrainer(Trainer):
    """See Lightning's Trainer. Signals, the choice of a checkpoint to continue from, and the watch over the other ranks
    are always there: plugins.callbacks.stop, resume and heartbeat.

    Args:
        precision: auto (chosen by size of the model and by machine, see lm.runtime), 32-true, bf16-mixed, or fp8:
            bf16-mixed with the blocks' matrix products in FP8 (plugins.precision.float8).
        plugins: as of Lightning's Trainer; a precision plugin here needs precision to be null.
    """

    def __init__(self, *, precision: str | None = None, plugins: Any = None, **kwargs: Any) -> None:
        self.choice = ""  # why this precision and compilation, where the recipe chose
        if precision == "fp8":
            from plugins.precision.float8 import Float8

            given = plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]
            precision, plugins = None, [*given, Float8()]
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
        trainer.callbacks[:0] = [self.resume, Heartbeat()]

    def _teardown(self) -> None:
        """Also after an exception; loggers have said their last by now."""
        super()._teardown()
        run_lock.release(Path(self.default_root_dir))


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
