"""Cells as Ray Tune trials: one process a core, used again for cell after cell, progress on one line each."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from plugins.loggers.sweep_ledger import STOPPED, SweepLedger
from sweeps.config import SweepConfig
from sweeps.grid import Cell
from sweeps.kind import SweepKind
from sweeps.trial import CellTrial, trial_spec


def run_trials(
    ledger: SweepLedger,
    config: SweepConfig,
    cells: Sequence[Cell],
    parent_run_id: str,
    done_before: int,
    kind: SweepKind,
) -> float:
    """Run the cells in the given order, as many at a time as Ray has room for.

    Returns:
        Compute seconds of all trials: CPU seconds, or seconds of wall time for trials on GPUs.

    Raises:
        KeyboardInterrupt: SIGINT arrived; trials were stopped.
    """
    from ray import tune

    progress = Progress(ledger, parent_run_id, cells, done_before)
    specs = {cell.cell_id: _spec(cell, config, ledger.uri, parent_run_id, kind) for cell in cells}
    resources: dict[str, float] = {"cpu": config.resources.trial_cpus}
    if config.resources.gpus:
        resources["gpu"] = config.resources.gpus * config.resources.processes
    tuner = tune.Tuner(
        tune.with_resources(kind.trial or CellTrial, resources),
        param_space={"spec": tune.grid_search([specs[cell.cell_id] for cell in cells])},
        tune_config=tune.TuneConfig(
            reuse_actors=True,
            trial_dirname_creator=lambda trial: str(trial.trial_id),
            scheduler=kind.scheduler() if kind.scheduler else None,
        ),
        run_config=tune.RunConfig(
            name=f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
            storage_path=os.path.abspath(os.path.join(config.runs_dir, "ray")),
            verbose=0,
            callbacks=[tune_callback(progress)],
            failure_config=tune.FailureConfig(max_failures=config.max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
        ),
    )
    tuner.fit()
    if progress.done < len(cells):  # Tune returns quietly after SIGINT
        raise KeyboardInterrupt
    return progress.gpu_seconds if config.resources.gpus else progress.cpu_seconds


def _spec(cell: Cell, config: SweepConfig, uri: str, parent_run_id: str, kind: SweepKind) -> dict[str, Any]:
    more = kind.spec(cell)
    spec = trial_spec(cell, config, uri, parent_run_id)
    spec["params"] |= kind.cell_params(cell)
    spec["recipe"]["trainer"]["callbacks"] += more.pop("callbacks", [])
    spec |= more
    return spec


class Progress:
    """Counts finished cells and prints one line for each."""

    def __init__(self, ledger: SweepLedger, parent_run_id: str, cells: Sequence[Cell], done_before: int):
        self.ledger = ledger
        self.parent_run_id = parent_run_id
        self.cost = {cell.cell_id: cell.relative_cost for cell in cells}
        self.done_before = done_before
        self.done = 0
        self.cpu_seconds = self.gpu_seconds = 0.0
        self._done_cost = 0.0
        self._started = time.monotonic()

    def finished(self, spec: dict[str, Any], result: dict[str, Any]) -> None:
        """A trial came to its end; result is what run_cell returned."""
        self.cpu_seconds += result["cpu_seconds"]
        self.gpu_seconds += result["wall_seconds"]
        text = result["status"]
        if text == STOPPED and result["run_id"]:  # its own worker may be ended before it can say so
            self.ledger.close_cell(result["run_id"], STOPPED, result["error"])
        if text == "complete":
            text = f"loss {result['val_loss']:.4f}"
        elif result["error"]:
            text += ": " + result["error"].splitlines()[-1]
        self._line(spec, f"{text}  {result['wall_seconds']:.0f} s")

    def died(self, spec: dict[str, Any], error: str) -> None:
        """A trial's process died for the last time."""
        self.ledger.fail_cell(self.parent_run_id, spec["cell_id"], spec["label"], error)
        self._line(spec, f"failed: its process died ({error.strip().splitlines()[-1] if error.strip() else 'unknown'})")

    def _line(self, spec: dict[str, Any], text: str) -> None:
        self.done += 1
        self._done_cost += self.cost[spec["cell_id"]]
        elapsed = time.monotonic() - self._started
        left = elapsed * (sum(self.cost.values()) / self._done_cost - 1)
        total = self.done_before + len(self.cost)
        print(f"[{self.done_before + self.done}/{total}] {spec['label']:<14} {text}  ~{left:.0f} s left", flush=True)


def tune_callback(progress: Progress) -> Any:
    """A Ray Tune callback that tells `progress`."""
    from ray import tune

    class Report(tune.Callback):
        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            progress.finished(trial.config["spec"], trial.last_result)

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            error = str(trial.get_error() or "") if hasattr(trial, "get_error") else ""
            progress.died(trial.config["spec"], error)

    return Report()
