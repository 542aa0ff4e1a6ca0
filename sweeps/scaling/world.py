"""A world in which the right answer is known: a surface fitted to the user's own runs, drawn with its uncertainty.

Approach 2's parabola is biased even without noise, by an amount that depends on the grid and on the surface ("Problems
with Chinchilla Approach 2", Open Athena), and no resampling of its own points shows that. So its replicates are made
here: constants of L = E + A / N^alpha + B / D^beta are drawn around the fit of the user's runs; losses with noise
follow on the user's design; approach 2 is fitted to them; its miss of the drawn surface's own optimum is known. That
miss, taken off the user's estimate, is a draw of the truth (the basic bootstrap, Davison and Hinkley 1997, section
5.2.1, with bias and noise together).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import residual_noise
from sweeps.scaling.optimum import FlopRule, flop_rule, optimum
from sweeps.scaling.parametric import ParametricFit, Problem, fit_parametric
from sweeps.scaling.table import Array, FitError, RunTable

KEEP = 8  # fits that fit_once remembers
# An exponent whose standard error is a larger share of it than this is not identified.
FLAT = 0.5
# Exponents of a drawn surface stay in this range; draws outside take the fit's own constants.
LEAST_EXPONENT, LARGEST_EXPONENT = 0.02, 2.0


@dataclass(frozen=True)
class World:
    """k surfaces. theta: [k, 5] fp64 (ln A, ln B, ln E, alpha, beta). rule: C as a function of N and D."""

    theta: Array
    rule: FlopRule

    @property
    def e(self) -> Array:
        """[k] irreducible loss."""
        return np.exp(self.theta[:, 2])

    def optimum(self, c_flops: float) -> tuple[Array, Array, Array]:
        """N*, D* and loss of each surface at a budget, [k] each."""
        return optimum(self.theta, self.rule, c_flops)

    def loss(self, n_params: Array | float, d_tokens: Array | float) -> Array:
        """[k, points] or [k] fp64, nats per token, without noise."""
        log_n, log_d = np.log(n_params), np.log(d_tokens)
        log_a, log_b, log_e, alpha, beta = self.theta.T[(slice(None), slice(None)) + (None,) * np.ndim(log_n)]
        return np.asarray(np.exp(log_e) + np.exp(log_a - alpha * log_n) + np.exp(log_b - beta * log_d))

    def slopes(self, budgets: Array) -> tuple[Array, Array]:
        """Exponents of N* and D* between the smallest and the largest budget, [k] each."""
        low, high = self.optimum(float(budgets.min())), self.optimum(float(budgets.max()))
        span = np.log(budgets.max() / budgets.min())
        return np.log(high[0] / low[0]) / span, np.log(high[1] / low[1]) / span


def fit_once(table: RunTable, seed: int = 0) -> ParametricFit:
    """`fit_parametric`, of which the last few are kept: several approaches ask for the same one.

    Raises:
        FitError: as `fit_parametric`.
    """
    key = (table.n.tobytes(), table.d.tobytes(), table.c.tobytes(), table.loss.tobytes(), seed)
    if key not in _KEPT:
        if len(_KEPT) >= KEEP:
            _KEPT.pop(next(iter(_KEPT)))
        try:
            _KEPT[key] = fit_parametric(table, seed=seed)
        except FitError as error:
            _KEPT[key] = error
    kept = _KEPT[key]
    if isinstance(kept, FitError):
        raise kept
    return kept


def fitted_world(table: RunTable, seed: int = 0) -> tuple[ParametricFit, World] | None:
    """The surface of a table as a world of one; None where approach 3 cannot be fitted."""
    try:
        fit = fit_once(table, seed)
    except FitError:
        return None
    if fit.alpha <= 0 or fit.beta <= 0:
        return None
    return fit, World(fit.theta[None], flop_rule(table))


def draw_world(table: RunTable, fit: ParametricFit, sd: Array, generator: np.random.Generator) -> World:
    """Surfaces drawn around a fit: normal in the centred logs (exponents too), covariance sd^2 (J' J)^-1.

    Args:
        sd: [k] fp64, of ln loss of one run.
    """
    problem = Problem(table.n, table.d, table.loss)
    centred = problem.centre(fit.theta[None])
    # The pseudo-inverse drops directions the runs say nothing about: those draws keep the fit's value.
    root = np.linalg.pinv(_jacobian(problem, centred, fit), rcond=1e-6)
    step = sd[:, None] * (generator.standard_normal((len(sd), len(table))) @ root.T)
    drawn = np.repeat(centred, len(sd), axis=0)
    drawn[:, :3] += step[:, :3]
    with np.errstate(all="ignore"):
        drawn[:, 3:] *= np.exp(step[:, 3:])
    exponents = drawn[:, 3:]
    good = ((exponents > LEAST_EXPONENT) & (exponents < LARGEST_EXPONENT)).all(axis=1) & np.isfinite(drawn).all(axis=1)
    good &= drawn[:, 2] < np.log(table.loss.min())
    return World(problem.uncentre(np.where(good[:, None], drawn, centred)), flop_rule(table))


def flat_profile(table: RunTable, fit: ParametricFit) -> str:
    """Why the runs do not identify an exponent, or nothing: its standard error is above half its size.

    The standard error is that of the fit's own residuals and curvature, sd^2 (J' J)^-1.
    """
    problem = Problem(table.n, table.d, table.loss)
    jacobian = _jacobian(problem, problem.centre(fit.theta[None]), fit)
    errors = residual_noise(fit.residuals, 5).sd * np.sqrt(
        np.diag(np.linalg.pinv(jacobian.T @ jacobian, hermitian=True))
    )
    for name, value, relative in (("alpha", fit.alpha, errors[3]), ("beta", fit.beta, errors[4])):
        if relative > FLAT:
            return (
                f"flat profile: {name} {value:.2g} has a standard error of {relative:.0%}; widen the range of N and D"
            )
    return ""


def _jacobian(problem: Problem, centred: Array, fit: ParametricFit) -> Array:
    """[runs, 5] derivatives of ln L by ln A, ln B, ln E (centred), ln alpha and ln beta."""
    _, p1, p2, p3 = problem.residuals(centred)
    slopes = [-p1[0] * problem.x * fit.alpha, -p2[0] * problem.z * fit.beta]
    return np.stack([p1[0], p2[0], p3[0], *slopes], axis=1)


_KEPT: dict[tuple[bytes, bytes, bytes, bytes, int], ParametricFit | FitError] = {}
