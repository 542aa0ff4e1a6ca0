"""Approach 2's bias on the user's own grid: how far it misses a known answer on the same design, without any noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sweeps.scaling.approaches import Model
from sweeps.scaling.optimum import flop_rule
from sweeps.scaling.parametric import ParametricFit
from sweeps.scaling.table import FitError, RunTable
from sweeps.scaling.world import World


@dataclass(frozen=True)
class Bias:
    """How far a fit misses a known answer without any noise, on the same design.

    Attributes:
        target: FLOPs of n_opt, d_opt and loss.
        a: fitted exponent of N* minus the surface's.
        n_opt, d_opt, loss: relative errors of N*, D* and the loss at the optimum there.
    """

    target: float
    a: float
    n_opt: float
    d_opt: float
    loss: float


def own_grid_bias(
    table: RunTable, parametric_fit: ParametricFit, target_c: float, refit: Callable[[RunTable], Model]
) -> Bias | None:
    """Fits noise-free losses of a surface on the user's own (N, D) points.

    Args:
        parametric_fit: the surface, fitted to the user's runs.
        target_c: FLOPs to compare at.
        refit: the approach whose bias is asked for.

    Returns:
        the bias, or None where the approach refuses even noise-free losses on this grid.
    """
    world = World(parametric_fit.theta[None], flop_rule(table))
    losses = world.loss(table.n, table.d)[0]
    clean = replace(table, runs=tuple(replace(r, loss=float(y)) for r, y in zip(table.runs, losses, strict=True)))
    try:
        fit = refit(clean)
    except FitError:
        return None
    n, d, loss = (float(x[0]) for x in world.optimum(target_c))
    true_a = float(world.slopes(table.budgets)[0][0])
    if not np.isfinite(n):
        return None
    return Bias(
        target_c, fit.a - true_a, fit.n_opt(target_c) / n - 1, fit.d_opt(target_c) / d - 1,
        fit.loss_opt(target_c) / loss - 1,
    )  # fmt: skip
