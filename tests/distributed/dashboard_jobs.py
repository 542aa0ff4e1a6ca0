"""A small run of the recipe's own module and data under any layout, for callbacks that look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lm.config import ModelConfig, RuntimeConfig
from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule
from lm.module import LlamaModule
from lm.optim.groups import OptimConfig
from lm.optim.schedule import ScheduleConfig
from plugins.callbacks.dashboard import Dashboard
from tests.distributed.scenario import Layout, build_trainer

SHAPE = ModelConfig(
    vocab_size=263, d_model=25, n_layers=2, n_heads=6, n_kv_heads=2, d_head=4, d_ff=38, init_std=0.1
)  # sizes that 4 ranks do not divide
OPTIM = OptimConfig(lr=5e-3, eps=1e-6, weight_decay=0.1, schedule=ScheduleConfig(warmup_steps=2))
WINDOWS, LENGTH, ACCUMULATE = 8, 16, 2


def write_data(folder: Path) -> Path:
    """Two sources whose documents end inside windows."""
    documents = {
        name: {split: random_documents(1500, SHAPE.vocab_size, 12, seed=seed) for split in ("train", "validation")}
        for seed, name in enumerate(("prose", "code"))
    }
    write_folder(folder, documents, SHAPE.vocab_size)
    return folder


class Losses(Callback):
    """The loss of every step, and the learning rate, exactly."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


def train(
    layout: Layout,
    data: Path,
    callbacks: list[Callback],
    steps: int,
    optim: OptimConfig = OPTIM,
    runtime: RuntimeConfig = RuntimeConfig(),
    ckpt_path: Path | None = None,
    **options: Any,
) -> list[float]:
    """Losses of all micro-batches of this rank."""
    losses = Losses()
    trainer = build_trainer(
        layout, steps, accumulate=1, callbacks=[*callbacks, losses], limit_val_batches=0, log_every_n_steps=1, **options
    )
    parts = layout.world_size // layout.arguments.get("tensor_parallel", 1)
    module = LlamaModule(SHAPE, optim, seed=3, runtime=runtime)
    batch = TokenDataModule(str(data), LENGTH, WINDOWS * LENGTH, WINDOWS // parts // ACCUMULATE)
    trainer.fit(module, datamodule=batch, ckpt_path=ckpt_path)
    return losses.losses


def watch(layout: Layout, data: Path, steps: int = 4, muon: bool = False) -> dict[str, Any]:
    """Dashboards of two runs, AdamW and Muon, and the losses with and without one."""
    boards = {"adamw": (dashboard := Dashboard(2, score_every=1))}
    losses = train(layout, data, [dashboard], steps)
    if muon:
        boards["muon"] = Dashboard(2, score_every=2)
        train(layout, data, [boards["muon"]], steps, OptimConfig("muon", lr=5e-3))
    bare = train(layout, data, [], steps)
    return {
        "same": losses == bare,
        "losses": losses,
        **{name: {key: list(points) for key, points in board.history.items()} for name, board in boards.items()},
    }


class SkipAt(Callback):
    """A guard that rejects one step."""

    def __init__(self, step: int):
        self.step = step

    def on_fit_start(self, trainer, module):
        trainer.strategy.guards.append(lambda norm, loss: trainer.global_step == self.step)


class Slow(Callback):
    """Rank 1 computes slowly."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_fit_start(self, trainer, module):
        import time

        if trainer.global_rank == 1:
            module.model.blocks[0].mlp.register_forward_pre_hook(lambda *_: time.sleep(self.seconds))


def skipped(layout: Layout, data: Path) -> dict[str, list]:
    dashboard = Dashboard(1, score_every=1)
    train(layout, data, [SkipAt(1), dashboard], 3)
    return {name: list(points) for name, points in dashboard.history.items()}


def slow(layout: Layout, data: Path) -> list[str]:
    """Warnings of a run with a slow rank."""
    import warnings

    dashboard = Dashboard(1, straggler_patience=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import plugins.callbacks.dashboard as module

        said: list[str] = []
        module.rank_zero_warn = said.append  # type: ignore[assignment]
        train(layout, data, [dashboard, Slow(0.03)], 4)
    del caught
    return said


def parameters_before(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.lightning_module.model.named_parameters()}
