"""Repeated data (Muennighoff et al. 2023, arXiv 2305.16264, equations 5 and 6): L(N, D, U) with U unique tokens.

    L = E + A / N'^alpha + B / D'^beta
    D' = U_D + U_D R_D* (1 - exp(-R_D / R_D*)),   U_D = min(D, U),     R_D = D / U_D - 1 (repeats)
    N' = U_N + U_N R_N* (1 - exp(-R_N / R_N*)),   U_N = min(N, N*(U)), R_N = N / U_N - 1 (excess parameters)

N*(U) is the size for which U tokens are compute-optimal on the surface at C = 6 N D. A token seen again is worth less
each time, and so is a parameter beyond that size. The surface comes from runs without repeats; R_D* and R_N* are fitted
to all runs by the Huber loss (delta 1e-3) of ln L, summed.

The published runs hardly tell a small R_N* with a large R_D* from the reverse: the objective is nearly flat along that
direction, so the fit comes with the profile of each constant, and says when a profile stays flat to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from sweeps.scaling.bootstrap import Interval, draw_counts, interval
from sweeps.scaling.huber import DELTA, huber_terms
from sweeps.scaling.newton import newton_batch
from sweeps.scaling.parametric import certify
from sweeps.scaling.table import Array, FitError, RunTable

# Repeats and excess parameters worth anything at all lie far inside these.
LEAST, LARGEST = 0.05, 1e5
GRID, PROFILE = 36, 49
STARTS = 16
MIN_REPEATED = 6
# A constant is told apart from others whose best objective is at most this much (relative) higher: about one run's
# share of the published 182.
FLAT = 0.005
TOLERANCE = 1e-6
PERFECT = 1e-6  # objective of a run over delta^2 below which starts agree whatever their ratio
STEP = 1e-4


@dataclass(frozen=True)
class RepeatSurface:
    """E, A, B, alpha, beta of the surface for fresh data."""

    e: float
    a_coef: float
    b_coef: float
    alpha: float
    beta: float

    def fresh_size(self, unique_tokens: Array) -> Array:
        """N*(U): parameters for which U tokens are compute-optimal at C = 6 N D."""
        g = (self.alpha * self.a_coef / (self.beta * self.b_coef)) ** (1 / (self.alpha + self.beta))
        return np.asarray(g * np.power(g * unique_tokens, self.beta / self.alpha))

    def loss(self, n_params: Any, d_tokens: Any, unique_tokens: Any, r_d: Any, r_n: Any) -> Array:
        """L(N, D, U) in nats per token; fp64 arguments, arrays or numbers, that broadcast."""
        u_d = np.minimum(d_tokens, unique_tokens)
        u_n = np.minimum(n_params, self.fresh_size(u_d))
        d = u_d * (1 + r_d * -np.expm1(-(d_tokens / u_d - 1) / r_d))
        n = u_n * (1 + r_n * -np.expm1(-(n_params / u_n - 1) / r_n))
        return np.asarray(self.e + self.a_coef * n**-self.alpha + self.b_coef * d**-self.beta)


@dataclass(frozen=True)
class Profile:
    """Best objective with one constant held, the other free. values, objective: [points] fp64.

    low, high: where the objective is within .5% of the best; at the range's end when it stays so.
    """

    values: Array
    objective: Array
    low: float
    high: float


@dataclass(frozen=True)
class RepeatFit:
    """R_D* and R_N* on a surface.

    Attributes:
        r_d, r_n: epochs' worth of repeats, and sizes' worth of excess parameters, at which returns have fallen to 1/e.
        objective: sum of Huber losses of ln L. gradient: relative to the largest possible. agreeing, starts.
        residuals: [runs] fp64, ln L fitted - ln L measured.
        profile_d, profile_n: see Profile. flags: what limits the fit, in words.
    """

    surface: RepeatSurface
    r_d: float
    r_n: float
    objective: float
    gradient: float
    agreeing: int
    starts: int
    residuals: Array
    profile_d: Profile
    profile_n: Profile
    flags: tuple[str, ...]

    def loss(self, n_params: float, d_tokens: float, unique_tokens: float) -> float:
        """Loss of N parameters trained on D tokens of which U are unique, nats per token."""
        values = (np.float64(v) for v in (n_params, d_tokens, unique_tokens, self.r_d, self.r_n))
        return float(self.surface.loss(*values))


class RepeatProblem:
    """The objective over theta = [ln R_D*, ln R_N*], for a batch of weights."""

    def __init__(self, table: RunTable, surface: RepeatSurface, weights: Array | None = None) -> None:
        self.surface, self.weights = surface, weights
        self.n, self.d, self.log_loss = table.n, table.d, np.log(table.loss)
        unique = table.optional("unique_tokens")
        self.unique = np.where(np.isfinite(unique), np.minimum(unique, self.d), self.d)

    def predict(self, theta: Array) -> Array:
        """[m, 2] -> ln L, [m, runs]."""
        r_d, r_n = np.exp(np.clip(theta, -20, 20)).T
        return np.log(self.surface.loss(self.n, self.d, self.unique, r_d[:, None], r_n[:, None]))

    def value(self, theta: Array) -> Array:
        """Objective over delta^2 with every row once, [m]."""
        return huber_terms(self.predict(theta), self.log_loss[None], None, np.arange(len(theta)))[0]

    def curved(self, theta: Array, which: np.ndarray) -> tuple[Array, Array, Array]:
        """Objective over delta^2, gradient [m, 2] and Hessian [m, 2, 2]; ln L's derivatives by central differences."""
        predicted = self.predict(theta)
        value, psi, inside = huber_terms(predicted, self.log_loss[None], self.weights, which)
        steps = STEP * np.eye(2)
        above, below = [self.predict(theta + s) for s in steps], [self.predict(theta - s) for s in steps]
        slopes = np.stack([(a - b) / (2 * STEP) for a, b in zip(above, below, strict=True)], axis=1)
        bends = [(a - 2 * predicted + b) / STEP**2 for a, b in zip(above, below, strict=True)]
        both = (self.predict(theta + steps.sum(0)) - above[0] - above[1] + predicted) / STEP**2
        hessian = np.matmul(slopes * inside[:, None], slopes.transpose(0, 2, 1))
        for i, j, bend in ((0, 0, bends[0]), (1, 1, bends[1]), (0, 1, both), (1, 0, both)):
            hessian[:, i, j] += (psi * bend).sum(axis=1)
        return value, np.einsum("mkr,mr->mk", slopes, psi), hessian

    def gradient_scale(self) -> float:
        """Largest gradient in ln L that the rows could give."""
        return len(self.n) / DELTA


def fit_repeats(table: RunTable, surface: RepeatSurface) -> RepeatFit:
    """Fits R_D* and R_N*.

    Args:
        table: runs with `unique_tokens`; a run without it has only fresh tokens.
        surface: of fresh data, see `parametric.fit_parametric`.

    Raises:
        FitError: fewer than 6 runs with repeated tokens, or a fit that is not certified.
    """
    problem = RepeatProblem(table, surface)
    repeated = int(np.sum(problem.d > 1.01 * problem.unique))
    if repeated < MIN_REPEATED:
        raise FitError(
            f"repeats needs {MIN_REPEATED} runs or more that repeat tokens (column unique_tokens), got {repeated}"
        )
    logs = np.linspace(np.log(LEAST), np.log(LARGEST), GRID)
    lattice = np.stack([axis.ravel() for axis in np.meshgrid(logs, logs)], axis=1)
    values = problem.value(lattice)
    starts = lattice[np.argsort(values)[:STARTS]]
    found = newton_batch(problem.curved, starts, TOLERANCE * problem.gradient_scale())
    best = int(np.argmin(found.value))
    value, theta = float(found.value[best]), found.x[best]
    agreeing = int(np.sum(found.value <= value * (1 + 1e-5) + PERFECT * len(table)))
    relative = float(found.gradient_norm[best] / problem.gradient_scale())
    certify(relative, agreeing, STARTS, "repeats")
    profile_d, profile_n = (_profile(problem, axis, value, float(theta[axis])) for axis in (0, 1))
    return RepeatFit(
        surface, float(np.exp(theta[0])), float(np.exp(theta[1])), value * DELTA**2, relative, agreeing, STARTS,
        problem.predict(theta[None])[0] - problem.log_loss, profile_d, profile_n,
        _flags(profile_d, profile_n),
    )  # fmt: skip


def _profile(problem: RepeatProblem, axis: int, best: float, log_at: float) -> Profile:
    """Best objective along one constant, the other one minimised at each value."""
    logs = np.linspace(np.log(LEAST), np.log(LARGEST), PROFILE)

    def held(log: float) -> float:
        def other(free: float) -> float:
            return float(problem.value(np.array([[log, free] if axis == 0 else [free, log]]))[0])

        first = logs[int(np.argmin([other(free) for free in logs]))]
        width = logs[1] - logs[0]
        return float(minimize_scalar(other, bounds=(first - width, first + width), method="bounded").fun)

    objective = np.array([held(log) for log in logs])
    inside = np.exp([log_at, *logs[objective <= best * (1 + FLAT)]])
    return Profile(np.exp(logs), objective * DELTA**2, float(inside.min()), float(inside.max()))


def _flags(profile_d: Profile, profile_n: Profile) -> tuple[str, ...]:
    found = []
    for name, profile in (("R_D*", profile_d), ("R_N*", profile_n)):
        open_ends = profile.low <= LEAST * 1.001 or profile.high >= LARGEST * 0.999
        if open_ends or profile.high > 3 * profile.low:
            found.append(
                f"flat profile: {name} from {profile.low:.3g} to {profile.high:.3g}"
                f"{' (the range searched)' if open_ends else ''} fits within {FLAT:.1%} of the best objective"
            )
    return tuple(found)


def bootstrap_repeats(table: RunTable, fit: RepeatFit, k: int = 1000, seed: int = 0) -> Array:
    """[k, 2] R_D* and R_N* refitted on runs drawn with replacement; the surface stays; NaN where not converged."""
    counts = draw_counts(table, k, np.random.default_rng(seed))
    problem = RepeatProblem(table, fit.surface, counts)
    start = np.tile(np.log([fit.r_d, fit.r_n]), (k, 1))
    found = newton_batch(problem.curved, start, TOLERANCE * problem.gradient_scale())
    converged = found.gradient_norm <= 10 * TOLERANCE * problem.gradient_scale()
    return np.where(converged[:, None], np.exp(np.clip(found.x, -20, 20)), np.nan)


def loss_interval(fit: RepeatFit, draws: Array, n_params: float, d_tokens: float, unique_tokens: float) -> Interval:
    """95% interval of `RepeatFit.loss`, of R_D* and R_N* alone: the surface's own uncertainty is not in it."""
    n, d, u = (np.float64(v) for v in (n_params, d_tokens, unique_tokens))
    return interval(fit.surface.loss(n, d, u, draws[:, 0], draws[:, 1]))
