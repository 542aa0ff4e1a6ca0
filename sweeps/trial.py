"""One cell of a sweep: trained by the same recipe as the command line, inside a Ray Tune trial.

Importing this module is cheap; torch, Lightning and MLflow are imported once in each worker process, by `setup`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
import time
import traceback
import warnings
from typing import Any

from ray import tune

from lm.errors import ConfigError
from plugins.loggers.sweep_ledger import (
    COMPLETE,
    DIVERGED,
    FAILED,
    RUNNING,
    SweepLedger,
    cell_tags,
    with_retries,
)  # fmt: skip
from plugins.loggers.tracking import patient_uri
from sweeps.config import SweepConfig
from sweeps.grid import Cell
from sweeps.recipe import cell_recipe

# Logged points of a cell's loss curve: enough to draw it, few enough to cost nothing.
_POINTS_A_CELL = 40


def trial_spec(cell: Cell, config: SweepConfig, tracking_uri: str, parent_run_id: str) -> dict[str, Any]:
    """All a worker must know to run a cell, as plain values."""
    return {
        "cell_id": cell.cell_id,
        "label": cell.label,
        "budget_flops": cell.budget_flops,
        "vocab_size": cell.model.vocab_size,
        "threads": config.resources.cpus,
        "tracking_uri": tracking_uri,
        "experiment": config.experiment,
        "parent_run_id": parent_run_id,
        "params": {
            "cell_id": cell.cell_id,
            "budget_flops": cell.budget_flops,
            "sweep": config.name,
            "warmup_steps": cell.warmup_steps,
            "steps": cell.steps,
        },
        "recipe": recipe_config(cell, config, parent_run_id),
    }


def recipe_config(cell: Cell, config: SweepConfig, parent_run_id: str) -> dict[str, Any]:
    """The cell as a config for recipes.build: what a YAML file for recipes.pretrain would hold."""
    logger = {
        "run_name": cell.label,
        "tags": cell_tags(cell.cell_id, cell.budget_flops),
        "parent_run_id": parent_run_id,
    }
    recipe = cell_recipe(cell, config, cell.cell_id, os.path.abspath(config.data.dir), logger)
    recipe["seed_everything"] = cell.seed
    recipe["trainer"] |= {
        "devices": 1,
        "log_every_n_steps": max(1, cell.steps // _POINTS_A_CELL),
        "val_check_interval": cell.steps,  # once, after the last step
        "enable_progress_bar": False,
        "enable_checkpointing": False,  # a cell is cheaper to run again than to keep
        "callbacks": [
            {"class_path": "plugins.callbacks.throughput.Throughput"},
            {"class_path": "sweeps.stop_diverged.StopDiverged"},
        ],
    }
    return recipe


class CellTrial(tune.Trainable):
    """One call of `step` trains one cell. The process is used again for the next cell: imports cost 10 CPU seconds."""

    def setup(self, config: dict[str, Any]) -> None:
        self.spec = config["spec"]
        _prepare_process(self.spec)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.spec = new_config["spec"]
        return True

    def step(self) -> dict[str, Any]:
        return {"done": True, **run_cell(self.spec)}


def _prepare_process(spec: dict[str, Any]) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = patient_uri(spec["tracking_uri"])
    import torch

    torch.set_num_threads(spec["threads"])
    torch.set_flush_denormal(True)  # denormals late in a decay to 0 slow a CPU several times
    warnings.filterwarnings("ignore")
    # So that no cell's clock counts imports.
    import mlflow.tracking  # noqa: F401

    import recipes.build  # noqa: F401
    from recipes.cpu import keep_freed_memory

    keep_freed_memory()

    for name in ("lightning.pytorch", "lightning.fabric", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_cell(spec: dict[str, Any]) -> dict[str, Any]:
    """Train and validate one cell and close its MLflow run.

    Returns:
        status (complete, diverged or failed), val_loss, error, run_id, cpu_seconds, wall_seconds of this process.
    """
    cpu, wall = time.process_time(), time.perf_counter()
    ledger = SweepLedger(spec["tracking_uri"], spec["experiment"])
    # A process that died under this cell (lost node, out of memory) left a run behind.
    ledger.supersede(run for run in ledger.cells(spec["parent_run_id"]) if run.cell_id == spec["cell_id"])
    folder = tempfile.mkdtemp(prefix="scalewright-cell-")
    logger: Any = None
    status, loss, error = FAILED, math.nan, ""
    try:
        parts = _build({**spec["recipe"], "runs_dir": folder})
        logger = parts.trainer.loggers[0]
        parts.trainer.fit(parts.module, datamodule=parts.data)
        status, loss = outcome(parts.module.metrics, parts.trainer, spec["vocab_size"])
    except ConfigError as problem:
        error = str(problem)
    except Exception:  # a cell that crashes is a row of the table, not the end of the sweep
        error = traceback.format_exc(limit=-8)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}
    run_id = getattr(logger, "run_id", None)
    if run_id is None:
        ledger.fail_cell(spec["parent_run_id"], spec["cell_id"], spec["label"], error)
    else:
        status, error = _close(ledger, logger, spec, status, error, seconds)
    return {"status": status, "val_loss": loss, "error": error.strip(), "run_id": run_id, **seconds}


def _build(recipe: dict[str, Any]) -> Any:
    from recipes.build import build

    # jsonargparse prints usage before it exits; the reason is in the message it prints last.
    with contextlib.ExitStack() as stack:
        text = stack.enter_context(tempfile.TemporaryFile("w+"))
        try:
            with contextlib.redirect_stderr(text), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
                return build(recipe)
        except SystemExit:
            text.seek(0)
            raise ConfigError(" ".join(text.read().split())[-2000:]) from None


def outcome(metrics: dict[str, float], trainer: Any, vocab_size: int) -> tuple[str, float]:
    """Whether a finished run is a point of its curve, and its validation loss in nats per token.

    Diverged: a loss that is not finite, a run that stopped early for that reason, or one that ends above the loss of
    guessing uniformly, ln V, where training begins.
    """
    loss = metrics.get("val_loss", math.nan)
    if not math.isfinite(loss) or loss > math.log(vocab_size) or trainer.global_step < trainer.max_steps:
        return DIVERGED, loss
    return COMPLETE, loss


def _close(
    ledger: SweepLedger, logger: Any, spec: dict[str, Any], status: str, error: str, seconds: dict[str, float]
) -> tuple[str, str]:
    """Send what is left, then the status; a result that the store did not take is a failed cell."""
    from mlflow.entities import Metric, Param

    now_ms = int(time.time() * 1000)
    rows = [Metric(key, value, now_ms, 0) for key, value in seconds.items()]
    params = [Param(key, str(value)) for key, value in spec["params"].items()]
    with_retries(lambda: ledger.client.log_batch(logger.run_id, metrics=rows, params=params))
    give_up = time.monotonic() + 120
    while logger.pending and time.monotonic() < give_up:
        logger.flush()
        if logger.pending:
            time.sleep(1.0)
    if logger.pending and status != FAILED:
        status, error = FAILED, f"the tracking store did not take {logger.pending} metrics of this cell"
    if not ledger.close_cell(logger.run_id, status, error):
        return FAILED, "another process took this cell over"
    return status, error


__all__ = ["RUNNING", "CellTrial", "outcome", "recipe_config", "run_cell", "trial_spec"]
