"""What the processes of a test do; each function runs on every rank and returns plain values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from plugins.strategies.deepspeed import ZeRO
from tests.distributed.scenario import (
    CONFIG,
    Layout,
    Model,
    SaveAfterValidation,
    SaveAt,
    build_trainer,
    fit,
    shapes,
    snapshot,
)

STEPS, SAVED_STEP = 20, 10
SKIP_STEPS, SKIPPED = 5, 2


def train_and_resume(layout: Layout, folder: Path) -> dict[str, Any]:
    """Everything that is compared between layouts, in one launch.

    Leaves a checkpoint of step SAVED_STEP in folder / layout.name.
    """
    return {
        "whole": whole_run(layout, folder / layout.name),
        "resumed": resume(layout, folder / layout.name),
        "skip": run_with_skip(layout),
        "roll_back": roll_back(layout, folder / f"{layout.name}-back"),
        "tied": tied_run(layout, folder / f"{layout.name}-tied"),
        "bf16": bf16_run(layout),
    }


def curve(module: Model) -> dict[str, Any]:
    return {"losses": module.losses, "norms": module.norms}


def roll_back(layout: Layout, path: Path) -> dict[str, Any]:
    """Load a checkpoint into the running fit, after training has gone on: hashes at the save and after the load."""

    class LoadBack(SaveAt):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                hashes.append(snapshot(trainer.strategy))
                if trainer.global_step == self.step + 1:
                    trainer.strategy.load_checkpoint(self.path)
                    hashes.append(snapshot(trainer.strategy))

    hashes: list[dict[str, str]] = []
    fit(build_trainer(layout, 3, callbacks=[LoadBack(1, path)]), Model())
    saved, moved, loaded, continued = hashes
    return {"same": loaded == saved, "moved": saved != moved, "continued": continued != loaded}


def whole_run(layout: Layout, path: Path) -> dict[str, Any]:
    """With a validation after step SAVED_STEP, and the save after that."""
    trainer = build_trainer(
        layout,
        STEPS,
        callbacks=[SaveAfterValidation(SAVED_STEP, path)],
        val_check_interval=2 * SAVED_STEP,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    module = fit(trainer, Model(), validate=True)
    return {**curve(module), "shapes": shapes(module), "validation": module.validation_losses}


def resume(layout: Layout, path: Path) -> dict[str, Any]:
    return curve(fit(build_trainer(layout, STEPS), Model(), path))


def resume_crossings(pairs: list[tuple[Path, Layout]]) -> list[dict[str, Any]]:
    """Each checkpoint continued under its layout, one after the other in the same processes."""
    return [resume(layout, path) for path, layout in pairs]


def resume_each(layout: Layout, paths: list[Path]) -> list[dict[str, Any]]:
    return [resume(layout, path) for path in paths]


def tied_run(layout: Layout, path: Path) -> dict[str, Any]:
    """Embedding and head share a matrix; saved half way and resumed."""
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    whole = fit(build_trainer(layout, 4, callbacks=[SaveAt(2, path)]), Model(config))
    return {**curve(whole), "resumed": curve(fit(build_trainer(layout, 4), Model(config), path))}


def bf16_run(layout: Layout) -> dict[str, Any]:
    """bf16-mixed; also the dtypes that would go into a checkpoint."""
    trainer, module = build_trainer(layout, 6, precision="bf16-mixed", callbacks=[dtypes := Dtypes()]), Model()
    fit(trainer, module)
    return {**curve(module), "dtypes": dtypes.seen}


class Dtypes(Callback):
    """Notes the dtypes a checkpoint of the last step would hold."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == trainer.max_steps:
            tensors, _ = trainer.strategy.collect(with_optimizer=True)
            self.seen = sorted({str(tensor.dtype) for tensor in tensors.values()})


def run_with_skip(layout: Layout) -> dict[str, Any]:
    """A guard rejects step SKIPPED; state is hashed after each step."""
    watch = Watch()
    trainer, module = build_trainer(layout, SKIP_STEPS, callbacks=[watch]), Model()
    fit(trainer, module)
    return {**curve(module), "states": watch.states, "skipped": trainer.strategy.skipped_steps, "asked": watch.asked}


class Watch(Callback):
    """Guard and witness of run_with_skip."""

    def __init__(self) -> None:
        self.states: list[dict[str, str]] = []
        self.asked: list[tuple[float, float]] = []

    def on_fit_start(self, trainer, module):
        def guard(norm: float, loss: float) -> bool:
            self.asked.append((norm, loss))
            return trainer.global_step == SKIPPED

        trainer.strategy.guards.append(guard)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.states.append(snapshot(trainer.strategy))


def last_window_is_short(layout: Layout) -> dict[str, Any]:
    """An epoch of 3 micro-batches with accumulation 2: Lightning steps on the last one alone."""
    trainer, module = build_trainer(layout, -1, limit_train_batches=3), Model()
    trainer.fit_loop.max_epochs = 1
    fit(trainer, module)
    optimizer = trainer.strategy.optimizers[0]
    inner = optimizer.optimizer if isinstance(trainer.strategy, ZeRO) else optimizer
    steps = {float(state["step"]) for state in inner.state.values()}
    return {"global_step": trainer.global_step, "optimizer_steps": steps}


def failing_save(layout: Layout, folder: Path) -> str:
    """The last rank cannot write; every rank must see the same error."""
    import torch.distributed.checkpoint as dcp

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    class Break(SaveAt):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_rank == trainer.world_size - 1:
                dcp.FileSystemWriter.write_data = fail  # type: ignore[method-assign]
            super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    try:
        fit(build_trainer(layout, 2, callbacks=[Break(1, folder / "step-00000001")]), Model())
    except ValueError as error:
        return str(error)
    return "no error"


def failing_load(layout: Layout, path: Path) -> str:
    try:
        resume(layout, path)
    except ValueError as error:
        return str(error)
    return "no error"
