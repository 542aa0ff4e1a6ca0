"""Real runs with stages on a corpus in which an id tells its source, and what each step of them saw."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from numpy.typing import NDArray

from lm.config import ModelConfig, RuntimeConfig
from lm.data.synthetic import write_folder
from lm.datamodule import TokenDataModule
from lm.module import LlamaModule
from lm.optim.config import OptimConfig
from lm.optim.schedule import ScheduleConfig
from plugins.strategies import register

VOCAB, T, G = 300, 16, 256
RANGES = {"prose": (1, 100), "code": (100, 200), "reference": (200, 300)}  # ids of each source; 0 ends a document
LENGTHS = (5, 9, 14, 30, 70, 150)  # tokens of the documents, end-of-text included
SHAPE = ModelConfig(vocab_size=VOCAB, d_model=24, n_layers=2, n_heads=2, d_ff=32, init_std=0.1)

WSD = ScheduleConfig("wsd", warmup_steps=2, decay_fraction=0.25, floor=0.0)


def documents(source: str, n_tokens: int, seed: int) -> list[NDArray[np.int64]]:
    """Documents of LENGTHS with ids of the source's range, n_tokens or a little more in all."""
    rng, (low, high) = np.random.default_rng(seed), RANGES[source]
    found: list[NDArray[np.int64]] = []
    while sum(map(len, found)) < n_tokens:
        start, length = rng.integers(0, high - low), int(rng.choice(LENGTHS))
        # Something that can be learnt: each id follows from the one before it.
        body = low + (start + 3 * np.arange(length - 1)) % (high - low)
        found.append(np.append(body, 0))
    return found


def write_corpus(folder: Path) -> None:
    sources = {
        name: {"train": documents(name, n, seed), "validation": documents(name, 1500, seed + 10)}
        for seed, (name, n) in enumerate((("prose", 12_000), ("code", 9_000), ("reference", 6_000)))
    }
    write_folder(folder, sources, VOCAB, shard_tokens=3000)


class Recorded(LlamaModule):
    """Keeps what is logged, by step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.points: dict[int, dict[str, float]] = {}

    def record(self, values: dict[str, float]) -> None:
        super().record(values)
        self.points.setdefault(self.trainer.global_step, {}).update(values)


class Witness(Callback):
    """Of each step: RoPE, and of each micro-batch its ids and the source it names."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self._rows: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._rows.append({key: batch[key].clone() for key in ("input_ids", "labels", "source")})

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches != 0:
            return
        rows, self._rows = self._rows, []
        self.steps[trainer.global_step - 1] = {
            "rope": module.model.rope,
            "source": torch.cat([row["source"] for row in rows]).tolist(),
            "input_ids": torch.cat([row["input_ids"] for row in rows]).tolist(),
            "labels": torch.cat([row["labels"] for row in rows]).tolist(),
        }


class SaveAfter(Callback):
    """Checkpoints FOLDER/step-N after the given steps."""

    def __init__(self, folder: Path, *steps: int):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"step-{trainer.global_step:08d}")


def make_trainer(steps: int, callbacks: list[Callback], strategy: Any = "single", devices: int = 1) -> Trainer:
    register()
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def run(
    corpus: Path,
    steps: int,
    callbacks: list[Callback],
    *,
    schedule: ScheduleConfig = WSD,
    shape: ModelConfig = SHAPE,
    runtime: RuntimeConfig = RuntimeConfig(),
    ckpt_path: Path | None = None,
    strategy: Any = "single",
    devices: int = 1,
    val_interval: int = 0,
    **data: Any,
) -> tuple[dict[int, dict[str, Any]], Trainer]:
    """(what each 0-based step saw and logged, the trainer when all is over)."""
    witness = Witness()
    trainer = make_trainer(steps, [*callbacks, witness], strategy, devices)
    if val_interval:
        trainer.limit_val_batches, trainer.val_check_interval = 1.0, val_interval
        trainer.check_val_every_n_epoch = None
    # eps: a gradient that is zero but for rounding would else become a step of full size, of random sign.
    module = Recorded(shape, OptimConfig(lr=3e-3, eps=1e-6, schedule=schedule), runtime=runtime)
    settings = {"sequence_length": T, "global_batch_tokens": G, "micro_batch_size": 4, "seed": 3, **data}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=TokenDataModule(str(corpus), **settings), ckpt_path=ckpt_path)
    return {step: {**seen, **module.points[step + 1]} for step, seen in witness.steps.items()}, trainer


def source_of(row: list[int]) -> str:
    """Which source a window was cut from, by its ids alone.

    Raises:
        AssertionError: it mixes sources.
    """
    names = {name for name, (low, high) in RANGES.items() if any(low <= token < high for token in row)}
    assert len(names) == 1, names
    return names.pop()
