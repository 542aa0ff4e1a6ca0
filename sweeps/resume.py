"""Which sweep a command means: a new one, one to go on with, or one that is finished already."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.errors import ConfigError
from plugins.loggers.sweep_ledger import (
    DONE,
    RUNNING,
    SUPERSEDED,
    TRUNK,
    CellRun,
    SweepLedger,
    SweepRun,
    is_alive,
)  # fmt: skip
from sweeps.config import SweepConfig
from sweeps.grid import Cell, grid_id
from sweeps.ray_session import end_orphans
from sweeps.settings import differences


@dataclass(frozen=True)
class Choice:
    """What to do.

    Attributes:
        run_id: parent to go on with; None starts one.
        missing: cells to run.
        runs: child runs the parent has.
        previous: the parent as it was found.
        message: one line for the user.
    """

    run_id: str | None
    missing: list[Cell]
    runs: list[CellRun]
    previous: SweepRun | None
    message: str


def choose_parent(
    ledger: SweepLedger,
    config: SweepConfig,
    cells: Sequence[Cell],
    resume: bool,
    settings: Mapping[str, str] | None = None,
) -> Choice:
    """Find the newest sweep of this name that the grid can go on with.

    A parent fits when it has this very grid, or when all its finished cells are part of the grid (budgets or widths
    were added). A parent with finished cells of other settings or other data is left alone: mixing them would spoil
    the fit.

    Args:
        settings: of this sweep, from sweeps.settings; says what an earlier one did differently.

    Raises:
        ConfigError: an unfinished sweep and no `resume`, or its process still runs.
    """
    wanted = {cell.cell_id for cell in cells}
    grid = grid_id(cells)
    parents = ledger.sweeps(config.name)
    for parent in parents:
        runs = ledger.cells(parent.run_id)
        finished = {run.cell_id for run in runs if run.status in DONE}
        if parent.grid != grid and not (finished and finished <= wanted):
            continue
        missing = [cell for cell in cells if cell.cell_id not in finished]
        if not missing:
            message = f"sweep {config.name}: all {len(cells)} cells are in MLflow already (run {parent.run_id}), reused"
            return Choice(parent.run_id, [], runs, parent, message)
        _check_free(parent, config.name)
        done = len(cells) - len(missing)
        if not resume:
            raise ConfigError(
                f"sweep {config.name} is unfinished ({done} of {len(cells)} cells done, run {parent.run_id}):"
                " add --resume to run the others, or --name to start another"
            )
        message = f"sweep {config.name}: {done} of {len(cells)} cells are done, {len(missing)} to run"
        return Choice(parent.run_id, missing, runs, parent, message)
    message = f"sweep {config.name}: {len(cells)} cells to run"
    if parents:
        message += f"; the earlier sweep {config.name} stays as it is: {_why_other(parents[0], settings or {})}"
    return Choice(None, list(cells), [], None, message)


def _why_other(parent: SweepRun, settings: Mapping[str, str]) -> str:
    found = differences(parent.settings, settings) if parent.settings else []
    return "; ".join(found[:5]) if found else "it had other settings or data, or was made by another version"


def _check_free(parent: SweepRun, name: str) -> None:
    if is_alive(parent.driver):
        raise ConfigError(
            f"sweep {name} is still being run by process {parent.driver['pid']}: wait for it, or stop it first"
        )


def start_over_dead_driver(ledger: SweepLedger, choice: Choice) -> None:
    """End what the last driver left running and mark its half-done cells."""
    if choice.previous is None:
        return
    end_orphans(str(choice.previous.driver.get("session", "")))
    ledger.supersede(choice.runs)
    ledger.replace_failed(choice.runs)
    for run in ledger.cells(choice.previous.run_id, TRUNK):  # goes on in the same run, unless its folder is gone
        if run.status == RUNNING:
            ledger.finish_sweep(run.run_id, "interrupted", {})


def result_rows(ledger: SweepLedger, parent_run_id: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One row a cell, ascending by budget, width and seed, as MLflow has it.

    Keys: cell_id, run_id, status (complete, diverged, failed or missing), error, tries (its runs, superseded ones too),
    budget_flops, d_model, n_layers, seed, n_params, d_tokens, c_flops, global_batch_tokens, lr, trunk (MLflow run it
    went on from, or empty), val_loss (None without a finite one), cpu_seconds, wall_seconds, and val_loss/<source>,
    bpb/<source> of each source.
    """
    by_cell: dict[str, CellRun] = {}
    tries: dict[str, int] = {}
    for run in ledger.cells(parent_run_id):
        tries[run.cell_id] = tries.get(run.cell_id, 0) + 1
        known = by_cell.get(run.cell_id)
        if run.status != SUPERSEDED and (known is None or (run.status in DONE and known.status not in DONE)):
            by_cell[run.cell_id] = run
    ordered = sorted(cells, key=lambda cell: (cell.budget_flops, cell.model.d_model, cell.seed))
    return [_row(cell, by_cell.get(cell.cell_id), tries.get(cell.cell_id, 0)) for cell in ordered]


def _row(cell: Cell, run: CellRun | None, tries: int) -> dict[str, Any]:
    metrics = {} if run is None else run.metrics
    row: dict[str, Any] = {
        "cell_id": cell.cell_id,
        "run_id": None if run is None else run.run_id,
        "status": "missing" if run is None else run.status,
        "error": "" if run is None else run.tags.get("scalewright.error", ""),
        "tries": tries,
        "budget_flops": cell.budget_flops,
        "d_model": cell.model.d_model,
        "n_layers": cell.model.n_layers,
        "seed": cell.seed,
        "n_params": cell.n_params,
        "d_tokens": cell.tokens,
        "c_flops": cell.flops,
        "global_batch_tokens": cell.global_batch_tokens,
        "lr": cell.lr,
        "trunk": "" if run is None else run.params.get("trunk", ""),
    }
    for name in ("val_loss", "cpu_seconds", "wall_seconds"):
        row[name] = _finite(metrics.get(name))
    row |= {name: _finite(value) for name, value in sorted(metrics.items()) if name.startswith(("val_loss/", "bpb/"))}
    return row


def _finite(value: float | None) -> float | None:
    # SQL stores of MLflow turn infinity into the largest double.
    return value if value is not None and math.isfinite(value) and abs(value) < 1e300 else None
