"""The Huber loss of residuals, delta 1e-3, for a batch of problems: what every surface fit here minimises."""

from __future__ import annotations

import numpy as np

from sweeps.scaling.table import Array

DELTA = 1e-3


def huber_terms(
    predicted: Array, target: Array, weights: Array | None, which: np.ndarray
) -> tuple[Array, Array, Array]:
    """Huber losses of predicted - target, with what their gradient and Hessian are made of, all over delta^2.

    Args:
        predicted: [m, runs] fp64.
        target: [1 or problems, runs] fp64. weights: the same, or None for ones.
        which: [m] int, the problem of each row of `predicted`.

    Returns:
        sums over runs [m], slopes [m, runs], second derivatives [m, runs].
    """
    u = (predicted - (target if len(target) == 1 else target[which])) / DELTA
    psi = np.clip(u, -1, 1)
    value = psi * (u - 0.5 * psi)
    inside = np.equal(u, psi) / DELTA**2
    psi /= DELTA
    if weights is not None:
        w = weights if len(weights) == 1 else weights[which]
        value *= w
        psi *= w
        inside *= w
    return value.sum(axis=1), psi, inside


class CentredProblem:
    """Rows of a surface fit on logs centred at their means, for a batch of weights or of targets.

    Args:
        n_params, d_tokens: [runs] fp64.
        target: [1 or m, runs] fp64.
        weights: [m, runs] fp64 counts of each row per problem, or None for ones.
    """

    def __init__(self, n_params: Array, d_tokens: Array, target: Array, weights: Array | None = None) -> None:
        log_n, log_d = np.log(n_params), np.log(d_tokens)
        self.n_mean, self.d_mean = float(log_n.mean()), float(log_d.mean())
        self.x, self.z = log_n - self.n_mean, log_d - self.d_mean
        self.target, self.weights = target, weights

    def terms(self, predicted: Array, which: np.ndarray) -> tuple[Array, Array, Array]:
        """`huber_terms` of predictions [m, runs] against these targets."""
        return huber_terms(predicted, self.target, self.weights, which)

    def gradient_scale(self) -> float:
        """Largest gradient the rows could give in a constant that moves the prediction one for one."""
        return len(self.x) / DELTA
