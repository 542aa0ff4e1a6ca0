"""A cell as a config for recipes.build: what a YAML file for recipes.pretrain would hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from sweeps.config import SweepConfig
from sweeps.grid import Cell


def cell_recipe(cell: Cell, config: SweepConfig, name: str, data_dir: str, logger: dict[str, Any]) -> dict[str, Any]:
    """The parts that a sweep's cell and a planned run share.

    Args:
        name: of the run.
        data_dir: the corpus, as the process that trains will find it.
        logger: arguments of the MLflow logger besides the experiment.
    """
    schedule = {**config.optim.get("schedule", {}), "warmup_steps": cell.warmup_steps}
    return {
        "name": name,
        "tokens": float(cell.tokens),
        "model": {
            "config": {key: value for key, value in dataclasses.asdict(cell.model).items() if value is not None},
            "optim": {**config.optim, "lr": cell.lr, "schedule": schedule},
            "seed": cell.seed,
            "runtime": {"compile": False},  # cells are compared: all are computed alike, whatever their size
        },
        "data": {
            "dir": data_dir,
            "sequence_length": cell.sequence_length,
            "global_batch_tokens": cell.global_batch_tokens,
            "weights": config.data.weights,
            "validation_windows": config.data.validation_windows,
            "seed": cell.seed,
        },
        "trainer": {
            "accelerator": "gpu" if config.resources.gpus else "cpu",
            "precision": config.precision,
            "logger": {
                "class_path": "plugins.loggers.mlflow.MLflowLogger",
                "init_args": {"experiment": config.experiment, **logger},
            },
        },
    }
