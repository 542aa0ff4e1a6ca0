"""What holding a budget out would show if a surface held exactly: the part of a holdout error that is only noise."""

from __future__ import annotations

import numpy as np

from sweeps.scaling.bootstrap import draw_noise, residual_noise
from sweeps.scaling.curves import LOG_LOSS, vertices
from sweeps.scaling.optimum import FlopRule, optimum
from sweeps.scaling.parametric import ParametricFit, Problem
from sweeps.scaling.table import Array, RunTable
from sweeps.scaling.varpro import LinearProblem

REPLICATES = 100


def surface_holdout_errors(
    table: RunTable,
    fit: ParametricFit,
    rule: FlopRule,
    kind: type[Problem] | type[LinearProblem],
    from_budget: float,
    budget: float,
    near: int | None,
    seed: int,
) -> Array:
    """Relative errors of predicting `budget` from the smaller ones on simulated sweeps whose surface is the fit.

    Args:
        table: the rows the surface was fitted to. kind: its objective.

    Returns:
        [k] fp64; NaN where a replicate has no interior optimum.
    """
    generator = np.random.default_rng(seed + 2)
    noise = residual_noise(fit.residuals, 5).sd * draw_noise(table, REPLICATES, generator)
    log_loss = np.log(table.loss) + fit.residuals + noise
    row_budget = table.budget
    small, held = row_budget <= from_budget * (1 + 1e-9), np.isclose(row_budget, budget, rtol=1e-9)
    problem = kind(table.n[small], table.d[small], table.loss[small], log_loss=log_loss[:, small])
    found = problem.refine(problem.centre(np.repeat(fit.theta[None], REPLICATES, axis=0)))
    predicted = optimum(problem.uncentre(found.x), rule, budget)[2]
    losses = np.exp(log_loss[:, held])
    vertex = np.exp(vertices(np.log(table.n[held]), np.log(table.d[held]), losses, near)[:, LOG_LOSS])
    measured = np.where(np.isfinite(vertex), vertex, losses.min(axis=1))
    return predicted / measured - 1
