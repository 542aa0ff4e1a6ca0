"""Benchmark of a training step: the recipe with its default callbacks and logger over a bare PyTorch loop.

Both train the same model on the same kind of batches in the same process, turn by turn: some steps of the recipe,
then as many of the bare loop, so that a machine whose speed drifts is fair to both.

Examples:
  python -m recipes.bench step
  python -m recipes.bench step --d-model 128 --sequence-length 128 --rounds 41
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from recipes.command import command_parser

SIZES = ("d_model", "n_layers", "sequence_length", "sequences")  # named in the result


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench step", __doc__)
    add_sizes(parser)
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    parser.add_argument("--rounds", type=int, default=21, help="rounds; the median ratio counts")
    return parser


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options of the run that this benchmark and those of callbacks measure."""
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--n-layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a window")
    parser.add_argument("--sequences", type=int, default=8, help="windows a step")
    parser.add_argument("--vocab-size", type=int, default=4096)


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print the result as JSON and return it."""
    options = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(Path(temporary), options)
    print(json.dumps(result))
    return result


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each side by round, and the median of bare / recipe: 1 means no overhead."""
    from recipes.build import build

    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    write_data(folder, options)
    parts = build(run_config(folder, options, options.steps * (options.rounds + 1)))
    trainer: Any = parts.trainer
    turns = _turns(options)
    trainer.callbacks.append(turns)
    trainer.fit(parts.module, datamodule=parts.data)
    ratios = [bare / recipe for recipe, bare in zip(turns.recipe_seconds, turns.bare_seconds, strict=True)]
    step_tokens = options.steps * options.sequences * options.sequence_length
    return {
        "benchmark": "step",
        "ratio": round(statistics.median(ratios), 4),
        "ratio_each": [round(ratio, 4) for ratio in ratios],
        "recipe_tokens_per_s": round(step_tokens / statistics.median(turns.recipe_seconds)),
        "bare_tokens_per_s": round(step_tokens / statistics.median(turns.bare_seconds)),
        **{key: getattr(options, key) for key in SIZES},
    }


def write_data(folder: Path, options: argparse.Namespace) -> None:
    """A folder `data` of random ids, enough for 40 steps without a repeat."""
    from lm.data.synthetic import random_documents, write_folder

    tokens = 40 * options.sequence_length * options.sequences
    documents = {
        "train": random_documents(tokens, options.vocab_size, 300, seed=0),
        "validation": random_documents(4 * options.sequence_length, options.vocab_size, 300, seed=1),
    }
    write_folder(folder / "data", {"random": documents}, options.vocab_size)


def run_config(folder: Path, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Of the recipe's run of so many steps over that data, with its default callbacks and logger."""
    batch_tokens = options.sequences * options.sequence_length
    return {
        "name": "bench",
        "runs_dir": str(folder / "runs"),
        "tokens": float(batch_tokens * steps),
        "model": {
            "config": {
                "vocab_size": options.vocab_size,
                "d_model": options.d_model,
                "n_layers": options.n_layers,
                "n_heads": max(1, options.d_model // 64),
            },
            "runtime": {"compile": False},  # as the bare loop
        },
        "data": {
            "dir": str(folder / "data"),
            "sequence_length": options.sequence_length,
            "global_batch_tokens": batch_tokens,
            "validation_windows": 1,
        },
        "trainer": {"accelerator": "cpu", "devices": 1, "precision": "32-true", "limit_val_batches": 0},
    }


def _turns(options: argparse.Namespace) -> Any:
    """A callback that, after every `steps` steps of the recipe, lets the bare loop do as many."""
    import torch
    from lightning.pytorch import Callback

    from lm.init import materialize
    from lm.model import Llama
    from lm.optim.groups import parameter_groups

    class Turns(Callback):
        def __init__(self) -> None:
            self.recipe_seconds: list[float] = []
            self.bare_seconds: list[float] = []
            self.started = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with torch.device("meta"):
                self.model = Llama(pl_module.model_config)
            materialize(self.model, pl_module.model_config, 0, "cpu")
            groups = parameter_groups(self.model, pl_module.model_config, pl_module.optim_config)
            self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
            self.batches = iter(trainer.datamodule.train_dataloader())
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step % options.steps != 0:
                return
            recipe = time.perf_counter() - self.started
            start = time.perf_counter()
            for _ in range(options.steps):
                self.bare_step(next(self.batches), trainer.gradient_clip_val)
            bare = time.perf_counter() - start
            if trainer.global_step > options.steps:  # the first round warms both sides up
                self.recipe_seconds.append(recipe)
                self.bare_seconds.append(bare)
            self.started = time.perf_counter()

        def bare_step(self, batch: dict[str, Any], clip: float) -> None:
            nll = self.model(batch["input_ids"], batch["document_ids"], batch["labels"])
            (nll.sum() / batch["loss_tokens"]).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    return Turns()
