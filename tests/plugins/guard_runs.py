"""Small guarded runs on data that can be learnt, with spikes put in on purpose."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from lm.config import ModelConfig
from lm.data.order import DataOrder
from lm.data.synthetic import write_folder
from lm.data.windows import Batch, WindowReader
from lm.datamodule import StreamLoader, TokenDataModule
from lm.module import LlamaModule
from lm.optim.config import OptimConfig
from lm.optim.schedule import ScheduleConfig
from plugins.callbacks.checkpoint import PeriodicCheckpoint
from plugins.callbacks.spike_guard import SpikeGuard
from plugins.strategies import register

VOCAB, LENGTH, SAMPLES = 257, 16, 8
SHAPE = ModelConfig(vocab_size=VOCAB, d_model=24, n_layers=1, n_heads=2)


def documents(n_tokens: int, seed: int) -> list[np.ndarray]:
    """Chains that go on from an id to one of four: a loss of log 4 = 1.39 is the best there is."""
    rng = np.random.default_rng(seed)
    ids = np.empty(n_tokens, dtype=np.uint32)
    ids[0] = 1
    for i, choice in enumerate(rng.integers(0, 4, n_tokens - 1)):
        ids[i + 1] = 1 + (3 * int(ids[i]) + int(choice)) % 32
    parts = [part.copy() for part in np.split(ids, range(50, n_tokens, 50))]
    for part in parts:
        part[-1] = 0
    return parts


def make_folder(path: Path) -> Path:
    sources = {
        name: {"train": documents(60_000, seed), "validation": documents(4_000, seed + 10)}
        for seed, name in enumerate(("prose", "code"))
    }
    write_folder(path, sources, VOCAB)
    return path


class PoisonedReader(WindowReader):
    """Windows of some samples hold random ids: (source, window) pairs, whenever they are read."""

    poisoned: frozenset[tuple[int, int]]

    def batch(self, source: Any, window: Any, sequence_length: int) -> Batch:
        batch = super().batch(source, window, sequence_length)
        for row, pair in enumerate(zip(source.tolist(), window.tolist(), strict=True)):
            if pair in self.poisoned:
                ids = torch.randint(1, VOCAB, (sequence_length + 1,), generator=torch.Generator().manual_seed(pair[1]))
                batch["input_ids"][row], batch["labels"][row] = ids[:-1], ids[1:]
        return batch


class PoisonedData(TokenDataModule):
    """TokenDataModule in which the samples k of `poison`, counted without any drop, are random ids in any order."""

    poison: range = range(0)

    def undropped(self) -> DataOrder:
        return DataOrder(self.plan, self.manifest.tokens("train"))

    def train_dataloader(self) -> StreamLoader:
        loader = super().train_dataloader()
        if self.poison:
            source, window = self.undropped().locate(np.array(self.poison))
            reader = PoisonedReader(self.manifest, "train", self.source_names)
            reader.poisoned = frozenset(zip(source.tolist(), window.tolist(), strict=True))
            loader.stream.reader = reader
        return loader


class Inject(Callback):
    """Calls `action` with (trainer, module, batch) for the micro-batches of one step, the first time it is reached."""

    def __init__(self, step: int, action: Callable[[Any, Any, Any], None]):
        self.step, self.action = step, action
        self.seen = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step and self.seen < trainer.accumulate_grad_batches:
            self.seen += 1
            self.action(trainer, module, batch)


class Curve(Callback):
    """Loss of each step by the number of steps done; later branches replace earlier ones. Ids of the samples too."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.ids: dict[int, list[Any]] = {}
        self.visited: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.losses[trainer.global_step] = float(trainer.strategy.reduce(module.step_loss, reduce_op="mean"))
            self.ids[trainer.global_step] = batch["input_ids"].tolist()
            self.visited.append(trainer.global_step)


def quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


def build(
    folder: Path,
    run_dir: Path,
    steps: int,
    guard: SpikeGuard | None,
    *callbacks: Callback,
    poison: range = range(0),
    strategy: Any = "single",
    devices: int = 1,
    save_every: int = 10,
    asynchronous: bool = False,
    optim: OptimConfig | None = None,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Trainer, LlamaModule, PoisonedData]:
    """Trainer, module and data of a run of `steps` steps."""
    quiet()
    register()
    options = {"gradient_clip_val": 1.0, "limit_val_batches": 0, "logger": False, **options}
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        default_root_dir=run_dir,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, *([guard] if guard else []), PeriodicCheckpoint(save_every, 3, asynchronous)],
        **options,
    )
    optim = optim or OptimConfig(lr=2e-2, schedule=ScheduleConfig(kind="wsd", warmup_steps=5, floor=0.0))
    source = PoisonedData(
        str(folder), **{"sequence_length": LENGTH, "global_batch_tokens": LENGTH * SAMPLES, "seed": 3, **(data or {})}
    )
    source.poison = poison
    return trainer, LlamaModule(SHAPE, optim), source


def run(*arguments: Any, ckpt_path: Any = None, **options: Any) -> tuple[Trainer, LlamaModule, PoisonedData]:
    trainer, module, data = build(*arguments, **options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer, module, data


def samples(step: int, n_steps: int = 1) -> range:
    """k of the steps from `step` on, where nothing is dropped before them."""
    return range(step * SAMPLES, (step + n_steps) * SAMPLES)


def random_tokens(trainer: Any, module: Any, batch: Any) -> None:
    for name in ("input_ids", "labels"):
        batch[name].copy_(torch.randint(1, VOCAB, batch[name].shape, generator=torch.Generator().manual_seed(0)))
