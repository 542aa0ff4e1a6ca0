"""A small run of the recipe's own module and data under any layout, for callbacks that look at it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lm.config import ModelConfig, RuntimeConfig
from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule
from lm.module import LlamaModule
from lm.optim.config import OptimConfig
from lm.optim.schedule import ScheduleConfig
from plugins.callbacks.checkpoint import PeriodicCheckpoint
from plugins.callbacks.dashboard import Dashboard
from plugins.callbacks.evaluation import Evaluation
from plugins.callbacks.integrity import Integrity, IntegrityError
from plugins.callbacks.samples import Samples
from plugins.strategies.parts import local
from tests.distributed.scenario import Layout, build_trainer

SHAPE = ModelConfig(
    vocab_size=263, d_model=25, n_layers=2, n_heads=6, n_kv_heads=2, d_head=4, d_ff=38, init_std=0.1
)  # sizes that 4 ranks do not divide
OPTIM = OptimConfig(lr=5e-3, eps=1e-6, weight_decay=0.1, schedule=ScheduleConfig(warmup_steps=2))
WINDOWS, LENGTH, ACCUMULATE = 8, 16, 2
PROMPTS = ["abc", "what of it"]


def write_data(folder: Path) -> Path:
    """Two sources whose documents end inside windows."""
    documents = {
        name: {split: random_documents(1500, SHAPE.vocab_size, 12, seed=seed) for split in ("train", "validation")}
        for seed, name in enumerate(("prose", "code"))
    }
    write_folder(folder, documents, SHAPE.vocab_size)
    (folder / "text.txt").write_text("what is scored while training goes on, " * 5)
    (folder / "asked.jsonl").write_text('{"prompt": "what of", "answer": ["it", "that"]}\n')
    return folder


class Losses(Callback):
    """The loss of every micro-batch, exactly."""

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
    before_fit: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[float]:
    """Losses of all micro-batches of this rank."""
    losses = Losses()
    trainer = build_trainer(
        layout, steps, accumulate=1, callbacks=[*callbacks, losses], limit_val_batches=0, log_every_n_steps=1, **options
    )
    parts = layout.world_size // layout.arguments.get("tensor_parallel", 1)
    module = LlamaModule(SHAPE, optim, seed=3, runtime=runtime)
    batches = TokenDataModule(str(data), LENGTH, WINDOWS * LENGTH, WINDOWS // parts // ACCUMULATE)
    before_fit()  # building a trainer silences warnings here
    trainer.fit(module, datamodule=batches, ckpt_path=ckpt_path)
    return losses.losses


class Scores(Evaluation):
    """Keeps what it records."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[int, dict[str, float]]] = []

    def scores(self, trainer: Any, window: int) -> dict[str, float]:
        self.seen.append((trainer.global_step, super().scores(trainer, window)))
        return self.seen[-1][1]


def watch(layout: Layout, data: Path, folder: Path, muon: bool = False, steps: int = 4) -> dict[str, Any]:
    """All that looks at a run, looking, and the run without it; dashboards of AdamW and Muon."""
    board, integrity = Dashboard(2, score_every=1), Integrity(1)
    samples = Samples(PROMPTS, 3, max_new_tokens=5, temperature=0.7)
    evaluation = Scores([str(data / "text.txt")], [str(data / "asked.jsonl")], every_n_steps=2)
    random_state = torch.get_rng_state()
    losses = train(layout, data, [samples, board, integrity, evaluation], steps, default_root_dir=folder)
    same_random_state = torch.equal(random_state, torch.get_rng_state())
    bare = train(layout, data, [], steps)
    boards = {"adamw": board}
    if muon:
        boards["muon"] = Dashboard(2, score_every=2)
        train(layout, data, [boards["muon"]], steps, OptimConfig("muon", lr=5e-3))
    return {
        "same": losses == bare,
        "same_random_state": same_random_state,
        "checks": integrity.checks,
        "scores": evaluation.seen,
        "texts": {path.name: path.read_text() for path in sorted((folder / "samples").iterdir())},
        **{name: {key: list(points) for key, points in board.history.items()} for name, board in boards.items()},
    }


class SkipAt(Callback):
    """A guard that rejects one step."""

    def __init__(self, step: int):
        self.step = step

    def on_fit_start(self, trainer, module):
        trainer.strategy.guards.append(lambda norm, loss: trainer.global_step == self.step)


def skipped(layout: Layout, data: Path) -> dict[str, list]:
    """A dashboard over a run whose second step is rejected."""
    dashboard = Dashboard(1, score_every=1)
    train(layout, data, [SkipAt(1), dashboard], 3)
    return {name: list(points) for name, points in dashboard.history.items()}


class Slow(Callback):
    """Rank 1 computes slowly."""

    def on_fit_start(self, trainer, module):
        if trainer.global_rank == 1:
            module.model.blocks[0].mlp.register_forward_pre_hook(lambda *_: time.sleep(0.1))


def slow(layout: Layout, data: Path) -> list[str]:
    """What the dashboard warns of in a run with a slow rank, on this rank."""
    dashboard = Dashboard(1, straggler_patience=2)
    with warnings.catch_warnings(record=True) as caught:
        train(layout, data, [dashboard, Slow()], 4, before_fit=lambda: warnings.simplefilter("always"))
    return [str(warning.message) for warning in caught if "dashboard" in str(warning.message)]


class Flip(Callback):
    """After a step, one mantissa bit of one weight on one rank, or of one of its optimizer states."""

    def __init__(self, step: int, rank: int, name: str, state: str = ""):
        self.step, self.rank, self.name, self.state = step, rank, name, state

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        whole_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not whole_step or trainer.global_step != self.step or trainer.global_rank != self.rank:
            return
        parameter = dict(module.named_parameters())[self.name]
        tensor = trainer.optimizers[0].state[parameter][self.state] if self.state else parameter
        words = local(tensor).view(torch.int32).view(-1)
        words[words.numel() // 2] ^= 1 << 3


def corrupt_each(layout: Layout, data: Path, folder: Path, flips: list[Flip]) -> list[dict[str, Any]]:
    """For each flip the error that ends its run, and the checkpoints it leaves; it saves after every step."""
    results = []
    for index, flip in enumerate(flips):
        root, error = folder / str(index), ""
        save = PeriodicCheckpoint(every_n_steps=1)
        try:
            callbacks = [flip, save, Integrity(2)]
            train(layout, data, callbacks, 3, default_root_dir=root, enable_checkpointing=True)
        except IntegrityError as raised:
            error = str(raised)
        saved = sorted(path.name for path in (root / "checkpoints").glob("step-*"))
        results.append({"error": error, "saved": saved})
    return results
