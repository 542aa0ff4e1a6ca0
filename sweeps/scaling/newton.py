"""Many small smooth minimisations at once, with exact Hessians: damped Newton over a batch of problems in numpy.

Close to the optimum (bootstrap resamples started from the full fit) this needs about a third of BFGS's evaluations.
The Hessian of a Huber objective jumps where a residual crosses delta and may be indefinite, so each step is taken in
the Hessian's eigenvectors with |eigenvalue| + damping, and the damping of a problem follows whether its last step
went down (Levenberg 1944, Marquardt 1963). One evaluation a step, also when the step is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sweeps.scaling.minimize import BatchMinimum
from sweeps.scaling.table import Array

# f(x [m, p], which [m] int) -> value [m], gradient [m, p], Hessian [m, p, p].
SecondOrder = Callable[[Array, np.ndarray], tuple[Array, Array, Array]]

FIRST_DAMPING = 1e-4
LEAST_CURVATURE = 1e-4
LEAST_DAMPING, LARGEST_DAMPING = 1e-10, 1e8


def newton_batch(
    objective: SecondOrder, start: Array, gradient_tolerance: float, max_iterations: int = 100
) -> BatchMinimum:
    """Minimises m independent problems of p parameters.

    Args:
        objective: values, gradients and Hessians of any subset of the problems.
        start: [m, p] fp64.
        gradient_tolerance: a problem is done when no gradient component is larger.
        max_iterations: evaluations; a problem also stops when its damping has grown without a decrease (rounding).

    Returns:
        The points reached; the caller decides from `gradient_norm` whether they count as converged.
    """
    m = len(start)
    x = start.copy()
    value, gradient, hessian = objective(x, np.arange(m))
    damping = np.full(m, FIRST_DAMPING)
    iterations = np.zeros(m, dtype=np.int64)
    active = np.flatnonzero(np.abs(gradient).max(axis=1) > gradient_tolerance)
    for _ in range(max_iterations):
        if len(active) == 0:
            break
        with np.errstate(over="ignore", invalid="ignore"):  # a wild trial point is refused: its value is no decrease
            trial = x[active] + _step(gradient[active], hessian[active], damping[active])
            new_value, new_gradient, new_hessian = objective(trial, active)
        iterations[active] += 1
        down = new_value <= value[active]
        damping[active] = np.where(down, np.maximum(damping[active] / 10, LEAST_DAMPING), damping[active] * 8)
        rows = active[down]
        x[rows], value[rows] = trial[down], new_value[down]
        gradient[rows], hessian[rows] = new_gradient[down], new_hessian[down]
        going = np.abs(gradient[active]).max(axis=1) > gradient_tolerance
        active = active[going & (damping[active] < LARGEST_DAMPING)]
    return BatchMinimum(x, value, np.abs(gradient).max(axis=1), iterations)


def _step(gradient: Array, hessian: Array, damping: Array) -> Array:
    """Newton steps [m, p] in units in which the Hessian's diagonal is 1, so that damping has no units.

    A parameter without curvature (no residual inside delta) gets a share of the largest one's: callers centre and
    scale so that parameters are alike.
    """
    diagonal = np.abs(np.einsum("mii->mi", hessian))
    scale = 1 / np.sqrt(np.maximum(diagonal, LEAST_CURVATURE * diagonal.max(axis=1, keepdims=True) + 1e-300))
    unit = hessian * scale[:, :, None] * scale[:, None, :]
    eigenvalues, vectors = np.linalg.eigh(unit)
    along = np.einsum("mji,mj->mi", vectors, gradient * scale) / (np.abs(eigenvalues) + damping[:, None])
    return -scale * np.einsum("mij,mj->mi", vectors, along)
