"""A guarded run with four kinds of spikes and a roll-back, the same under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lm.module import LlamaModule
from lm.optim.config import MuonConfig, OptimConfig
from plugins.callbacks.spike_guard import SpikeGuard
from tests.distributed.scenario import Layout, build_strategy, snapshot
from tests.plugins.guard_runs import SAMPLES, SHAPE, Curve, build, samples

STEPS = 22
NAN_LOSS, SCALED, NAN_GRADIENT, POISON = 2, 13, 16, 19  # 0-based steps
OPTIMS = {
    "adamw": OptimConfig(lr=5e-3, eps=1e-6),
    "muon": OptimConfig(name="muon", lr=2e-2, eps=1e-6, muon=MuonConfig(ns_dtype="float32")),
}


class Spiky(LlamaModule):
    """Each spike happens once, though the run comes by again after a roll-back."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        trainer = self.trainer
        step, first_time = trainer.global_step, trainer.global_step not in self.done
        last_rank = trainer.global_rank == trainer.world_size - 1
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and step not in (0, 1):
            self.done.add(step)
        if step == NAN_LOSS and last_rank:
            self.step_loss = self.step_loss * float("nan")  # the gradients are in order on all ranks
        if step == SCALED and first_time:
            return loss * 1e4
        if step == NAN_GRADIENT and first_time and last_rank:
            return loss * float("nan")
        return loss

    done: set[int]


class States(Callback):
    """Which steps left weights, moments and the optimizer's step counts as they were, bit for bit."""

    def __init__(self) -> None:
        self.before: dict[str, str] | None = None
        self.unchanged: list[int] = []
        self.partly: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches != 0:
            return
        now, step = snapshot(trainer.strategy), trainer.global_step - 1
        same = sum(now[key] == value for key, value in (self.before or {}).items())
        if self.before and same == len(now):
            self.unchanged.append(step)
        elif same and step != 0:
            self.partly.append(step)
        self.before = now


def train(layout: Layout, folder: Path, run_dir: Path, optimizer: str) -> dict[str, Any]:
    guard, curve, states = SpikeGuard(warmup=8, strikes=3, strike_window=10, margin_steps=2), Curve(), States()
    trainer, _, data = build(
        folder,
        run_dir,
        STEPS,
        guard,
        curve,
        states,
        poison=samples(POISON, 2),
        strategy=build_strategy(layout),
        devices=layout.world_size,
        data={"micro_batch_size": SAMPLES // layout.world_size // 2},
    )
    module = Spiky(SHAPE, OPTIMS[optimizer])
    module.done = set()
    trainer.fit(module, datamodule=data)
    return {
        "visited": curve.visited,
        "losses": list(curve.losses.values()),
        "unchanged": states.unchanged,
        "partly": states.partly,
        "skipped": data.skipped,
        "accumulate": trainer.accumulate_grad_batches,
        "guard": guard.state_dict(),
    }
