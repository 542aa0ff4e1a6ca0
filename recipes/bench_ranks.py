"""What benchmarks with one process a rank share: options, data, model, trainer, and the start of the processes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lm.config import ModelConfig
from lm.errors import ConfigError
from plugins.strategies.ports import free_port
from recipes.command import command_parser

SEQUENCE_LENGTH = 32
SIZES = ("d_model", "n_layers", "vocab_size", "processes")
_SPLITS = ("train", "validation")


def rank_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Parser of `recipes.bench NAME` with the sizes; --folder makes a process one of its ranks."""
    parser = command_parser(f"recipes.bench {name}", doc)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--n-layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--timeout-seconds", type=float, default=600)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def write_rank(options: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    """Leave what this rank measured for `from_ranks`; returns it."""
    (options.folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(measured))
    return measured


def from_ranks(name: str, argv: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank of `recipes.bench NAME` measured.

    Raises:
        ConfigError: with the last line of the rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_data(options, Path(folder))
        _run_ranks(name, argv, options, Path(folder))
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(options.processes)]


def model_config(options: argparse.Namespace) -> ModelConfig:
    """The model that is measured."""
    n_heads = max(2, options.d_model // 64)
    return ModelConfig(options.vocab_size, options.d_model, options.n_layers, n_heads, n_kv_heads=n_heads // 2)


def build_trainer(options: argparse.Namespace, strategy: Any, callback: Any, **more: Any) -> Any:
    """A trainer of two steps on the CPU, with nothing beside them."""
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        devices=options.processes,
        strategy=strategy,
        max_steps=2,
        max_epochs=-1,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def write_data(options: argparse.Namespace, folder: Path) -> None:
    """A prepared data folder of random ids in folder/data."""
    from lm.data.synthetic import random_documents, write_folder

    tokens = 20 * SEQUENCE_LENGTH * options.processes
    parts = {name: random_documents(tokens, options.vocab_size, 100, seed) for seed, name in enumerate(_SPLITS)}
    write_folder(folder / "data", {"random": parts}, options.vocab_size)


def _run_ranks(name: str, argv: list[str], options: argparse.Namespace, folder: Path) -> None:
    """One process a rank of `recipes.bench NAME`; when one fails the others are stopped.

    Raises:
        ConfigError: with the last line of the rank that failed.
    """
    command = [sys.executable, "-m", "recipes.bench", name, *argv, "--folder", str(folder)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    shared["WORLD_SIZE"] = str(options.processes)
    processes = []
    for rank in range(options.processes):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(folder / f"log{rank}", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + options.timeout_seconds
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        if process.returncode != 0:
            lines = (folder / f"log{rank}").read_text().split("\n")
            said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            raise ConfigError(f"rank {rank} of the {name} benchmark stopped ({process.returncode}): {said}")
