"""Benchmark of memory: bytes of parameters, gradients and optimizer state a rank holds, beside lm.plan's prediction.

Real processes joined by gloo train two steps under each strategy; each rank walks its tensors right before the
second optimizer step (plugins/strategies/memory.py says what counts). The largest rank is shown.

Examples:
  python -m recipes.bench memory
  python -m recipes.bench memory --d-model 128 --strategies fsdp zero3 --processes 2
"""

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
from lm.plan import MEMORY_STRATEGIES, memory_bytes
from plugins.strategies.ports import free_port
from recipes.command import command_parser

KINDS = ("parameters", "gradients", "optimizer_state")
_SEQUENCE_LENGTH = 32


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench memory", __doc__)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--n-layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--strategies", nargs="+", default=list(MEMORY_STRATEGIES), choices=MEMORY_STRATEGIES)
    parser.add_argument("--timeout-seconds", type=float, default=600)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print a table (stderr) and the result as JSON (stdout), and return it."""
    options = build_parser().parse_args(argv)
    if options.folder:
        return _measure_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        write_data(options, Path(folder))
        run_ranks("memory", argv, options, Path(folder))
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(options.processes)]
    rows = [compare(options, strategy, [rank[strategy] for rank in ranks]) for strategy in options.strategies]
    result = {
        "benchmark": "memory",
        "worst_difference": round(max(abs(row["difference"]) for row in rows), 4),
        "strategies": rows,
        **{key: getattr(options, key) for key in ("d_model", "n_layers", "vocab_size", "processes")},
    }
    print(_table(rows), file=sys.stderr)
    print(json.dumps(result))
    return result


def model_config(options: argparse.Namespace) -> ModelConfig:
    """The model that is measured."""
    n_heads = max(2, options.d_model // 64)
    return ModelConfig(options.vocab_size, options.d_model, options.n_layers, n_heads, n_kv_heads=n_heads // 2)


def _shards(strategy: str, processes: int) -> int | None:
    """hsdp is measured as two copies."""
    return processes // 2 if strategy == "hsdp" else None


def compare(options: argparse.Namespace, strategy: str, ranks: list[dict[str, int]]) -> dict[str, Any]:
    """Largest rank, prediction, and the difference that is farthest from 0, relative to the prediction."""
    shard = _shards(strategy, options.processes)
    predicted = memory_bytes(model_config(options), strategy, options.processes, shard=shard)
    measured = {kind: max(rank[kind] for rank in ranks) for kind in (*KINDS, "other")}
    differences = [float(measured[kind] / getattr(predicted, kind) - 1) for kind in KINDS]
    worst: float = max(differences, key=abs)
    return {
        "strategy": strategy,
        "measured_bytes": measured,
        "predicted_bytes": {kind: getattr(predicted, kind) for kind in KINDS},
        "difference": round(worst, 4),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["MB a rank: measured / predicted", f"{'strategy':10s}" + "".join(f"{kind:>20s}" for kind in KINDS)]
    for row in rows:
        pairs = [
            f"{row['measured_bytes'][kind] / 1e6:.3f} / {row['predicted_bytes'][kind] / 1e6:.3f}" for kind in KINDS
        ]
        lines.append(f"{row['strategy']:10s}" + "".join(f"{pair:>20s}" for pair in pairs))
    return "\n".join(lines)


def write_data(options: argparse.Namespace, folder: Path) -> None:
    """A prepared data folder of random ids in folder/data."""
    from lm.data.synthetic import random_documents, write_folder

    tokens = 20 * _SEQUENCE_LENGTH * options.processes
    parts = {name: random_documents(tokens, options.vocab_size, 100, seed) for seed, name in enumerate(_SPLITS)}
    write_folder(folder / "data", {"random": parts}, options.vocab_size)


_SPLITS = ("train", "validation")


def run_ranks(name: str, argv: list[str], options: argparse.Namespace, folder: Path) -> None:
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


def _measure_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Body of one rank: its bytes by strategy, written to folder/rankN.json."""
    measured = {strategy: train_and_measure(options, strategy) for strategy in options.strategies}
    (options.folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(measured))
    return measured


def train_and_measure(options: argparse.Namespace, name: str) -> dict[str, int]:
    """Two steps under a strategy, in this rank of a started group; what it held right before the second one."""
    import gc

    from lightning.pytorch import Callback, Trainer

    import plugins.strategies
    from lm.datamodule import TokenDataModule
    from lm.module import LlamaModule
    from plugins.strategies.hsdp import HSDP
    from plugins.strategies.memory import held_bytes

    class Measure(Callback):
        held: dict[str, int]

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 1:
                self.held = held_bytes(trainer.strategy)

    gc.collect()  # what the strategy before this one left
    plugins.strategies.register()
    strategy: Any = HSDP(shard=_shards(name, options.processes)) if name == "hsdp" else name
    trainer = Trainer(
        accelerator="cpu",
        devices=options.processes,
        strategy=strategy,
        max_steps=2,
        max_epochs=-1,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[measure := Measure()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TokenDataModule(str(options.folder / "data"), _SEQUENCE_LENGTH, _SEQUENCE_LENGTH * options.processes)
    trainer.fit(LlamaModule(model_config(options)), datamodule=data)
    return measure.held
