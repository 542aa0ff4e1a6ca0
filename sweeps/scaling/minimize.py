"""Many small smooth minimisations at once: BFGS over a batch of problems in numpy.

Scaling fits need the same 5-parameter objective minimised from dozens of starts, and again for thousands of bootstrap
resamples. Run one by one, the interpreter's overhead dominates; as a batch, the cost is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.table import Array

# f(x [m, p], which [m] int) -> value [m], gradient [m, p]; `which` names the problems the rows belong to.
Objective = Callable[[Array, np.ndarray], tuple[Array, Array]]

SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9


@dataclass
class BatchMinimum:
    """x: [m, p], value: [m], gradient_norm: [m] (largest absolute component), iterations: [m] int."""

    x: Array
    value: Array
    gradient_norm: Array
    iterations: np.ndarray


def minimize_batch(
    objective: Objective, start: Array, gradient_tolerance: float, max_iterations: int = 500
) -> BatchMinimum:
    """Minimises m independent problems of p parameters.

    Args:
        objective: values and gradients of any subset of the problems.
        start: [m, p] fp64.
        gradient_tolerance: a problem is done when no gradient component is larger.
        max_iterations: BFGS steps; a problem also stops when its line search finds no decrease (rounding).

    Returns:
        The points reached; the caller decides from `gradient_norm` whether they count as converged.
    """
    m, p = start.shape
    x = start.copy()
    value, gradient = objective(x, np.arange(m))
    inverse = np.broadcast_to(np.eye(p), (m, p, p)).copy()
    fresh = np.ones(m, dtype=bool)
    iterations = np.zeros(m, dtype=np.int64)
    active = np.flatnonzero(np.abs(gradient).max(axis=1) > gradient_tolerance)
    for _ in range(max_iterations):
        if len(active) == 0:
            break
        direction, slope = _descent(inverse, gradient, active)
        step, new_value, new_gradient, moved = _line_search(
            objective, x, value, gradient, direction, slope, active, fresh[active]
        )
        stuck = active[~moved]
        rows = active[moved]
        delta = step[moved]
        change = new_gradient[moved] - gradient[rows]
        _update_inverse(inverse, rows, delta, change, fresh)
        x[rows] += delta
        value[rows], gradient[rows] = new_value[moved], new_gradient[moved]
        iterations[rows] += 1
        retry = stuck[~fresh[stuck]]
        inverse[retry] = np.eye(p)
        fresh[retry] = True
        done = np.abs(gradient[rows]).max(axis=1, initial=0.0) <= gradient_tolerance
        active = np.concatenate([rows[~done], retry])
    return BatchMinimum(x, value, np.abs(gradient).max(axis=1), iterations)


def _descent(inverse: Array, gradient: Array, active: np.ndarray) -> tuple[Array, Array]:
    """Quasi-Newton directions [a, p] and their slopes [a]; steepest descent where the former does not descend."""
    g = gradient[active]
    direction = -np.einsum("mij,mj->mi", inverse[active], g)
    slope = np.einsum("mi,mi->m", direction, g)
    uphill = ~(slope < 0)
    if uphill.any():
        inverse[active[uphill]] = np.eye(g.shape[1])
        direction[uphill] = -g[uphill]
        slope[uphill] = -np.einsum("mi,mi->m", g[uphill], g[uphill])
    return direction, slope


def _line_search(
    objective: Objective,
    x: Array,
    value: Array,
    gradient: Array,
    direction: Array,
    slope: Array,
    active: np.ndarray,
    fresh: np.ndarray,
) -> tuple[Array, Array, Array, np.ndarray]:
    """Weak Wolfe conditions by bisection (Lewis and Overton 2013), which also works at the Huber loss's kinks.

    Returns:
        step [a, p], value [a], gradient [a, p] and whether a decrease was found [a].
    """
    a, p = direction.shape
    # The first step of a steepest descent has no scale of its own: move at most .1 in any parameter.
    largest = np.abs(direction).max(axis=1)
    length = np.where(fresh, np.minimum(1.0, 0.1 / np.maximum(largest, 1e-300)), 1.0)
    low, high = np.zeros(a), np.full(a, np.inf)
    best_value, best_gradient = value[active].copy(), gradient[active].copy()
    best_step, moved = np.zeros((a, p)), np.zeros(a, dtype=bool)
    open_ = np.arange(a)
    for _ in range(30):
        step = length[open_, None] * direction[open_]
        new_value, new_gradient = objective(x[active[open_]] + step, active[open_])
        enough = new_value <= value[active[open_]] + SUFFICIENT_DECREASE * length[open_] * slope[open_]
        steep = np.einsum("mi,mi->m", new_gradient, direction[open_]) < CURVATURE * slope[open_]
        lower = enough & (new_value < best_value[open_])
        keep = open_[lower]
        best_value[keep], best_gradient[keep], best_step[keep] = new_value[lower], new_gradient[lower], step[lower]
        moved[keep] = True
        high[open_[~enough]] = length[open_[~enough]]
        low[open_[enough & steep]] = length[open_[enough & steep]]
        length[open_] = np.where(np.isinf(high[open_]), 2 * length[open_], 0.5 * (low[open_] + high[open_]))
        open_ = open_[~enough | steep]
        if len(open_) == 0:
            break
    return best_step, best_value, best_gradient, moved


def _update_inverse(inverse: Array, rows: np.ndarray, delta: Array, change: Array, fresh: np.ndarray) -> None:
    """BFGS update of the inverse Hessians, in place; skipped where the curvature is not positive."""
    product = np.einsum("mi,mi->m", delta, change)
    size = np.linalg.norm(delta, axis=1) * np.linalg.norm(change, axis=1)
    good = product > 1e-12 * np.maximum(size, 1e-300)
    rows, s, y, sy = rows[good], delta[good], change[good], product[good]
    first = fresh[rows]
    scale = np.where(first, sy / np.einsum("mi,mi->m", y, y), 1.0)
    h = inverse[rows] * scale[:, None, None]
    hy = np.einsum("mij,mj->mi", h, y)
    factor = (sy + np.einsum("mi,mi->m", y, hy)) / sy**2
    outer = np.einsum("mi,mj->mij", hy, s)
    inverse[rows] = (
        h
        + factor[:, None, None] * np.einsum("mi,mj->mij", s, s)
        - (outer + outer.transpose(0, 2, 1)) / sy[:, None, None]
    )
    fresh[rows] = False
