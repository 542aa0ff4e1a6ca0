"""One cell of a sweep: trained by the same recipe as the command line, inside a Ray Tune trial.

Importing this module is cheap; torch, Lightning and MLflow are imported once in each worker process, by `setup`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import tune

from lm.errors import ConfigError, RunStopped
from plugins.loggers.delivery import run_id_of
from plugins.loggers.sweep_ledger import (
    COMPLETE,
    DIVERGED,
    FAILED,
    TRUNK,
    SweepLedger,
    with_retries,
)  # fmt: skip
from plugins.loggers.tracking import patient_uri
from sweeps import several
from sweeps.corpus_store import local_corpus
from sweeps.leftovers import cell_folder


class CellTrial(tune.Trainable):
    """One call of `step` trains one cell. The process is used again for the next cell: imports cost 10 CPU seconds."""

    def setup(self, config: dict[str, Any]) -> None:
        self.spec = config["spec"]
        _prepare_process(self.spec)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.spec = new_config["spec"]
        return True

    def step(self) -> dict[str, Any]:
        return {"done": True, **run_spec(self.spec)}


def _prepare_process(spec: dict[str, Any]) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = patient_uri(spec["tracking_uri"])
    prepare_thread(spec)
    warnings.filterwarnings("ignore")
    # So that no cell's clock counts imports.
    import mlflow.tracking  # noqa: F401

    import recipes.build  # noqa: F401
    from recipes.cpu import keep_freed_memory

    keep_freed_memory()

    for name in ("lightning.pytorch", "lightning.fabric", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


def prepare_thread(spec: dict[str, Any]) -> None:
    """For each thread that trains: both settings are a thread's own."""
    import torch

    torch.set_num_threads(spec["threads"])
    torch.set_flush_denormal(True)  # denormals late in a decay to 0 slow a CPU several times


def run_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """What a spec asks for: a cell or a trunk."""
    if spec["kind"] == TRUNK:
        from sweeps.trunk_trial import run_trunk

        return run_trunk(spec)
    return run_cell(spec)


def run_cell(spec: dict[str, Any]) -> dict[str, Any]:
    """Train and validate one cell and close its MLflow run.

    Returns:
        status (complete, diverged or failed), val_loss, error, run_id, again (a failure that another try may not meet),
        cpu_seconds, wall_seconds of this process.
    """
    cpu, wall = cpu_seconds_now(), time.perf_counter()
    ledger = SweepLedger(spec["tracking_uri"], spec["experiment"])
    # A process that died under this cell (lost node, out of memory) left a run behind.
    going_on = several.earlier_run(spec) if spec["several"] else None
    mine = [run for run in ledger.cells(spec["parent_run_id"]) if run.cell_id == spec["cell_id"]]
    ledger.supersede(run for run in mine if run.run_id != going_on)
    ledger.replace_failed(mine, (FAILED, DIVERGED))  # a try before this one, by the policy of retries
    if going_on is not None:
        ledger.reopen_cell(going_on)
    trained = Trained(going_on)
    try:
        train = _train_several if spec["several"] else _train
        train(spec, trained)
    except TrunkEnded as problem:
        trained.status, trained.error = problem.status, str(problem)
    except ConfigError as problem:
        trained.error, trained.again = str(problem), False
    except Exception:  # a cell that crashes is a row of the table, not the end of the sweep
        trained.error = traceback.format_exc(limit=-8)
    seconds = {"cpu_seconds": cpu_seconds_now() - cpu, "wall_seconds": time.perf_counter() - wall}
    status, error = trained.status, trained.error
    if trained.run_id is None:
        ledger.fail_cell(spec["parent_run_id"], spec["cell_id"], spec["label"], error, status, spec["kind"])
    else:
        status, error = close(ledger, trained, spec, seconds)
    return {
        "status": status, "val_loss": trained.loss, "error": error.strip(), "run_id": trained.run_id,
        "again": trained.again, **seconds,
    }  # fmt: skip


@dataclass
class Trained:
    """What came of a cell; pending are metric values that the tracking store did not take."""

    run_id: str | None = None
    status: str = FAILED
    loss: float = math.nan
    error: str = ""
    pending: int = 0
    again: bool = True


class TrunkEnded(Exception):
    """A branch has nothing to go on from: its trunk ended before, with this status."""

    def __init__(self, status: str, message: str):
        super().__init__(message)
        self.status = status


def _train(spec: dict[str, Any], trained: Trained) -> None:
    """In this process."""
    logger: Any = None
    checkpoint = None if spec["branch"] is None else branch_checkpoint(spec["branch"], spec["params"])
    with cell_folder() as folder:
        try:
            parts = build_parts({**spec["recipe"], "runs_dir": str(folder)})
            logger = parts.trainer.loggers[0]
            try:
                parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=checkpoint)
            except RunStopped as stop:  # gradients that are not finite for 100 steps, with losses that are
                trained.status, trained.error = getattr(stop, "status", DIVERGED), str(stop)
                return
            trained.status, trained.loss = outcome(parts.module.metrics, parts.trainer, spec["vocab_size"])
        finally:
            if logger is not None and logger.run_id is not None:
                trained.run_id = logger.run_id
                if not logger.flush(120):
                    trained.pending = logger.pending


def branch_checkpoint(branch: dict[str, Any], params: dict[str, Any]) -> str:
    """Where a branch begins; its trunk's MLflow run is noted in params["trunk"].

    Raises:
        TrunkEnded: the trunk did not come so far.
    """
    from plugins.strategies import checkpoint_io
    from sweeps.branch_points import checkpoint_at

    run = Path(branch["folder"]) / "run"
    path = checkpoint_at(run / "checkpoints", branch["step"])
    if not path.is_dir():
        status = DIVERGED if branch["trunk_status"] == DIVERGED else FAILED
        raise TrunkEnded(status, f"its trunk {status} before step {branch['step']}: there is no checkpoint {path}")
    if (problem := checkpoint_io.check(path)) is not None:
        raise TrunkEnded(FAILED, f"{problem}; remove it, and --resume trains the trunk again")
    params["trunk"] = run_id_of(run) or ""
    return str(path)


def _train_several(spec: dict[str, Any], trained: Trained) -> None:
    """In processes of its own."""
    try:
        metrics, step, trained.pending = several.train(spec)
    except Exception:
        trained.run_id = several.earlier_run(spec) or trained.run_id
        several.remove(spec)
        raise
    trained.run_id = several.earlier_run(spec)
    several.remove(spec)
    progress = SimpleNamespace(global_step=step, max_steps=spec["steps"])
    trained.status, trained.loss = outcome(metrics, progress, spec["vocab_size"])


def cpu_seconds_now() -> float:
    """Of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def build_parts(recipe: dict[str, Any]) -> Any:
    from recipes.build import build

    recipe = {**recipe, "data": {**recipe["data"], "dir": local_corpus(recipe["data"]["dir"])}}
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


def close(ledger: SweepLedger, trained: Trained, spec: dict[str, Any], seconds: dict[str, float]) -> tuple[str, str]:
    """Write the seconds, then the status; a result that the store did not take is a failed cell."""
    from mlflow.entities import Metric, Param

    assert trained.run_id is not None
    now_ms = int(time.time() * 1000)
    rows = [Metric(key, value, now_ms, 0) for key, value in seconds.items()]
    params = [Param(key, str(value)) for key, value in spec["params"].items()]
    with_retries(lambda: ledger.client.log_batch(trained.run_id, metrics=rows, params=params))
    status, error = trained.status, trained.error
    if trained.pending and status != FAILED:
        status, error = FAILED, f"the tracking store did not take {trained.pending} metrics of this cell"
    if not ledger.close_cell(trained.run_id, status, error):
        return FAILED, "another process took this cell over"
    return status, error
