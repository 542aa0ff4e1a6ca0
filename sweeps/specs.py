"""A cell as plain values: all that a worker must know to train it."""

from __future__ import annotations

import os
from typing import Any

from plugins.loggers.sweep_ledger import CELL, cell_tags
from sweeps import several
from sweeps.config import SweepConfig
from sweeps.corpus_store import absolute
from sweeps.grid import Cell
from sweeps.recipe import cell_recipe

# Logged points of a cell's loss curve: enough to draw it, few enough to cost nothing.
_POINTS_A_CELL = 40


def trial_spec(
    cell: Cell, config: SweepConfig, tracking_uri: str, parent_run_id: str, branch: dict[str, Any] | None = None
) -> dict[str, Any]:
    """All a worker must know to run a cell, as plain values.

    Args:
        branch: {"folder", "step"} of the trunk that the cell goes on from (sweeps.trunk_trial); None: from its start.
    """
    return {
        "kind": CELL,
        "branch": branch,
        "cell_id": cell.cell_id,
        "label": cell.label,
        "budget_flops": cell.budget_flops,
        "vocab_size": cell.model.vocab_size,
        "threads": config.resources.cpus,
        "steps": cell.steps,
        "several": several_of(config),
        "cells_dir": os.path.abspath(os.path.join(config.runs_dir, "cells")),
        "tracking_uri": tracking_uri,
        "experiment": config.experiment,
        "parent_run_id": parent_run_id,
        "params": {
            "cell_id": cell.cell_id,
            "budget_flops": cell.budget_flops,
            "sweep": config.name,
            "warmup_steps": cell.warmup_steps,
            "steps": cell.steps,
            "batch_tokens": cell.global_batch_tokens,
            "param": "standard" if cell.model.mup is None else "mup",
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
    recipe = cell_recipe(cell, config, cell.cell_id, absolute(config.data.dir), logger)
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
    resources = config.resources
    if resources.processes > 1:
        return several.with_processes(recipe, resources.processes, resources.strategy, cell.steps)
    return recipe


def several_of(config: SweepConfig) -> dict[str, Any] | None:
    """How the ranks of a cell are run; None for a cell of one process."""
    resources = config.resources
    if resources.processes == 1:
        return None
    return {
        "processes": resources.processes,
        "hang_seconds": resources.hang_seconds,
        "max_restarts": config.max_failures,
    }
