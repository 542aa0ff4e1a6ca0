"""A trunk of a sweep, trained in a trial; killed and started again, it goes on from its newest checkpoint."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.errors import ConfigError, RunStopped
from plugins.loggers.delivery import run_id_of
from plugins.loggers.sweep_ledger import COMPLETE, DIVERGED, TRUNK, SweepLedger, trunk_tags
from sweeps.branch_points import checkpoint_at, step_of
from sweeps.config import SweepConfig
from sweeps.specs import recipe_config
from sweeps.trial import Trained, build_parts, close, cpu_seconds_now
from sweeps.trunks import Trunk

_SAVES_A_TRUNK = 20


def trunk_folder(config: SweepConfig, parent_run_id: str, trunk: Trunk) -> str:
    """Where a trunk keeps its run; the same for every try, of any worker."""
    return os.path.abspath(os.path.join(config.runs_dir, "trunks", f"{parent_run_id[:12]}-{trunk.trunk_id}"))


def trunk_spec(trunk: Trunk, config: SweepConfig, tracking_uri: str, parent_run_id: str) -> dict[str, Any]:
    """All a worker must know to train a trunk, as plain values."""
    longest = trunk.cells[-1]
    recipe = recipe_config(longest, config, parent_run_id)
    recipe["trainer"]["logger"]["init_args"] |= {"run_name": trunk.label, "tags": trunk_tags(trunk.trunk_id)}
    every = max(1, trunk.steps // _SAVES_A_TRUNK)
    points = {"steps": sorted(set(trunk.starts)), "last": trunk.steps, "every_n_steps": every}
    recipe["trainer"]["callbacks"].append(
        {"class_path": "sweeps.branch_points.BranchPoints", "init_args": points}
    )  # fmt: skip
    recipe["trainer"] |= {"enable_checkpointing": True, "limit_val_batches": 0}
    return {
        "kind": TRUNK,
        "cell_id": trunk.trunk_id,
        "label": trunk.label,
        "folder": trunk_folder(config, parent_run_id, trunk),
        "starts": sorted(set(trunk.starts)),
        "threads": config.resources.cpus,
        "tracking_uri": tracking_uri,
        "experiment": config.experiment,
        "parent_run_id": parent_run_id,
        "params": {"sweep": config.name, "trunk_id": trunk.trunk_id, "trunk_steps": trunk.steps},
        "recipe": recipe | {"name": "run"},
    }


def run_trunk(spec: dict[str, Any]) -> dict[str, Any]:
    """Train what a trunk still lacks.

    Returns:
        as sweeps.trial.run_cell, without a loss.
    """
    cpu, wall = cpu_seconds_now(), time.perf_counter()
    run = Path(spec["folder"]) / "run"
    folder = run / "checkpoints"
    missing = [step for step in spec["starts"] if not _sound(folder, step)]
    trained = Trained(run_id_of(run))
    if not missing:
        trained.status = COMPLETE
        return _result(trained, cpu, wall)
    ledger = SweepLedger(spec["tracking_uri"], spec["experiment"])
    if trained.run_id is not None:
        ledger.reopen_cell(trained.run_id)
    try:
        _train(spec, trained, missing, folder)
    except RunStopped as stop:
        trained.status, trained.error = DIVERGED, str(stop)
    except ConfigError as problem:
        trained.error, trained.again = str(problem), False
    except Exception:
        trained.error = traceback.format_exc(limit=-8)
    result = _result(trained, cpu, wall)
    if trained.run_id is None:
        ledger.fail_cell(
            spec["parent_run_id"], spec["cell_id"], spec["label"], trained.error, trained.status, TRUNK
        )  # fmt: skip
    else:
        seconds = {name: result[name] for name in ("cpu_seconds", "wall_seconds")}
        result["status"], result["error"] = close(ledger, trained, spec, seconds)
    return result


def _result(trained: Trained, cpu: float, wall: float) -> dict[str, Any]:
    return {
        "status": trained.status, "val_loss": trained.loss, "error": trained.error.strip(), "run_id": trained.run_id,
        "again": trained.again, "cpu_seconds": cpu_seconds_now() - cpu, "wall_seconds": time.perf_counter() - wall,
    }  # fmt: skip


def _train(spec: dict[str, Any], trained: Trained, missing: Sequence[int], folder: Path) -> None:
    recipe = {**spec["recipe"], "runs_dir": spec["folder"]}
    points = recipe["trainer"]["callbacks"][-1]["init_args"]
    points["last"] = max(missing)
    parts = build_parts(recipe)
    logger = parts.trainer.loggers[0]
    try:
        parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=_goes_on_from(folder, min(missing)))
        reached = parts.trainer.global_step
        if reached < max(missing):
            trained.status, trained.error = DIVERGED, f"the loss is not finite at step {reached}"
        elif any(not _sound(folder, step) for step in missing):
            trained.error = f"not all checkpoints could be saved in {folder}"
        else:
            trained.status = COMPLETE
    finally:
        if logger.run_id is not None:
            trained.run_id = logger.run_id
            if not logger.flush(120):
                trained.pending = logger.pending


def _sound(folder: Path, step: int) -> bool:
    from plugins.strategies import checkpoint_io

    path = checkpoint_at(folder, step)
    return path.is_dir() and checkpoint_io.check(path) is None


def _goes_on_from(folder: Path, first_missing: int) -> str | None:
    """The newest sound checkpoint before the first branch point that is missing; None: from the start."""
    paths = sorted(folder.glob("step-*"), key=step_of, reverse=True)
    before = (path for path in paths if step_of(path) < first_missing and _sound(folder, step_of(path)))
    return next((str(path) for path in before), None)
