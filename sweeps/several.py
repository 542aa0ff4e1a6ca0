"""A cell that is trained by several processes: it keeps checkpoints while it runs, and goes on from them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from lm.data.files import exclusive, write_bytes
from plugins.loggers.delivery import run_id_of
from plugins.loggers.journal import FILE, Journal, decode
from plugins.loggers.sender import Sender
from sweeps.corpus_store import local_corpus
from sweeps.ranks import Job, run_ranks

CHECKPOINTS_A_CELL = 10


def with_processes(recipe: dict[str, Any], processes: int, strategy: str, steps: int) -> dict[str, Any]:
    """A cell's config for `processes` ranks, with checkpoints over its length."""
    recipe = copy.deepcopy(recipe)
    recipe["trainer"] |= {"devices": processes, "strategy": strategy, "enable_checkpointing": True}
    every = max(1, steps // CHECKPOINTS_A_CELL)
    recipe["trainer"]["callbacks"].append(
        {
            "class_path": "plugins.callbacks.checkpoint.PeriodicCheckpoint",
            "init_args": {"every_n_steps": every, "keep": 2},
        }
    )
    return recipe


def folder_of(spec: dict[str, Any]) -> Path:
    """Where a cell of several processes keeps its files; the same for every try, of any worker."""
    return Path(spec["cells_dir"]) / f"{spec['parent_run_id'][:12]}-{spec['cell_id']}"


def earlier_run(spec: dict[str, Any]) -> str | None:
    """MLflow run of a try of this cell that was cut off and can go on."""
    return run_id_of(folder_of(spec) / "run")


def train(spec: dict[str, Any]) -> tuple[dict[str, float], int, int]:
    """Train a cell, from its newest checkpoint where there is one.

    Returns:
        (its last metrics, steps done, metric values that MLflow did not take).

    Raises:
        ConfigError: its config is refused, or another worker trains it.
        RuntimeError: it failed more often than it may.
    """
    folder = folder_of(spec)
    with exclusive(_lock(folder), f"another worker trains cell {spec['cell_id']}"):
        several = spec["several"]
        job = Job(several["processes"], spec["threads"], folder, several["hang_seconds"], several["max_restarts"])
        run_dir, config = folder / "run", folder / "cell.yaml"
        recipe = copy.deepcopy(spec["recipe"])
        recipe |= {"runs_dir": str(folder), "name": "run"}
        recipe["data"]["dir"] = local_corpus(recipe["data"]["dir"])
        beat = {"class_path": "plugins.callbacks.beat_files.BeatFiles", "init_args": {"folder": str(job.heartbeat)}}
        recipe["trainer"]["callbacks"].append(beat)
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(config, json.dumps(recipe).encode())  # quoted, or YAML would read an id such as 12e34 as a number

        def arguments() -> list[str]:
            resume = ["--ckpt_path", "last"] if (run_dir / "config.yaml").exists() else []
            return ["fit", "--config", str(config), *resume]

        run_ranks(job, arguments)
        journal = Journal(run_dir / FILE)
        return *read_metrics(journal), Sender(run_dir, journal, spec["tracking_uri"], 10.0).pending()


def remove(spec: dict[str, Any]) -> None:
    """Remove the files of a cell that has ended. One that is cut off keeps them and goes on from them."""
    folder = folder_of(spec)
    shutil.rmtree(folder, ignore_errors=True)
    _lock(folder).unlink(missing_ok=True)


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def read_metrics(journal: Journal) -> tuple[dict[str, float], int]:
    """(last value of each metric, last step) of a run."""
    metrics: dict[str, float] = {}
    last = 0
    for record, _ in journal.read():
        if "metrics" in record:
            last = max(last, record["step"])
            metrics |= {key: decode(value) for key, value in record["metrics"].items()}
    return metrics, last
