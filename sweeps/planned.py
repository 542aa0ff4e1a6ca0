"""The run that a fit recommends, made by the sweep's own rules, so that only its size and length differ."""

from __future__ import annotations

import math
import os
from typing import Any

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.plan import n_params
from sweeps.config import SweepConfig
from sweeps.corpus_store import local_corpus
from sweeps.grid import Cell, Corpus, make_cell
from sweeps.recipe import cell_recipe
from sweeps.shapes import model_config

WIDTH_STEP = 8
_MAX_WIDTH = 1 << 15


def candidate_shapes(config: SweepConfig, vocab_size: int, n_opt: float) -> list[ModelConfig]:
    """Shapes of the sweep's family, width by width, up to the first that has more than n_opt parameters.

    Args:
        n_opt: N*, parameters under lm.plan's default convention.
    """
    shapes = []
    for width in range(WIDTH_STEP, _MAX_WIDTH, WIDTH_STEP):
        try:
            shape = model_config(config, width, vocab_size)
        except ConfigError:
            continue  # no head size divides this width
        shapes.append(shape)
        if n_params(shape) > n_opt:
            break
    return shapes


def plan_run(config: SweepConfig, corpus: Corpus, n_opt: float, budget: float, processes: int) -> Cell:
    """The cell nearest to N* that spends `budget` FLOPs, its batch a multiple of `processes`.

    Raises:
        ConfigError: no shape of the family comes near, or the run breaks a rule of the sweep.
    """
    shapes = candidate_shapes(config, corpus.vocab_size, n_opt)
    if not shapes:
        raise ConfigError(f"the sweep's model family has no width from {WIDTH_STEP} on that a head size divides")
    nearest = min(shapes, key=lambda shape: abs(math.log(n_params(shape) / n_opt)))
    return make_cell(config, corpus, budget, nearest.d_model, seed=0, multiple=processes)


def run_config(cell: Cell, config: SweepConfig, name: str, processes: int, forecast_id: str) -> dict[str, Any]:
    """The planned run as a config for recipes.pretrain.

    Args:
        name: of the run and its folder.
        processes: devices of the run; more than one trains under fsdp.
        forecast_id: written as a tag of the run, which links it to its forecast.
    """
    recipe = cell_recipe(
        cell,
        config,
        name,
        os.path.relpath(local_corpus(config.data.dir)),
        {"tags": {"scalewright.forecast_id": forecast_id}},
    )
    recipe["trainer"] |= {
        "devices": processes,
        "strategy": "fsdp" if processes > 1 else "single",
        "val_check_interval": max(1, cell.steps // 8),
    }
    return recipe
