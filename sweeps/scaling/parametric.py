"""Approach 3 of Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3): L(N, D) = E + A / N^alpha + B / D^beta.

Objective, their equation 3, as a sum over rows (Besiroglu et al. 2024, arXiv 2404.10102, show that a mean makes
optimizers stop early):

    sum_i Huber_delta( LSE(a - alpha ln N_i, b - beta ln D_i, e) - ln L_i ),   A = e^a, B = e^b, E = e^e, delta = 1e-3

Minimised with an analytic gradient on centred logs, scaled by 1 / delta^2, from seeded starts in one batch; the best is
polished by L-BFGS-B. A fit counts only when it is certified: the gradient is small and several starts agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from sweeps.scaling.huber import DELTA, CentredProblem
from sweeps.scaling.minimize import BatchMinimum, minimize_batch
from sweeps.scaling.newton import newton_batch
from sweeps.scaling.table import BUDGET_GAP, Array, FitError, RunTable

STARTS = 48
SAME_LOSS = 1e-9  # relative
MIN_ROWS = 6
# Relative to the largest gradient the rows could give (every residual beyond delta).
GRADIENT_TOLERANCE = 1e-6
AGREEMENT = 1e-5
MIN_AGREEING = 2
LARGEST_EXPONENT = 300.0
# E below this share of the lowest loss is not told apart from 0.
E_FLOOR = 1e-3


@dataclass(frozen=True)
class ParametricFit:
    """Approach 3's result.

    Attributes:
        e, a_coef, b_coef, alpha, beta: E (nats per token), A, B and the exponents.
        objective: sum of Huber losses.
        gradient: largest gradient component over the largest possible one.
        agreeing, starts: how many starts ended within 1e-5 (relative) of the best objective.
        residuals: [runs] fp64, ln L fitted - ln L measured.
        flags: what limits the fit, in words; empty when nothing does.
    """

    e: float
    a_coef: float
    b_coef: float
    alpha: float
    beta: float
    objective: float
    gradient: float
    agreeing: int
    starts: int
    residuals: Array
    flags: tuple[str, ...] = ()

    @property
    def a(self) -> float:
        """Exponent of N* in C when C is proportional to N D: beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def b(self) -> float:
        """Exponent of D* in C when C is proportional to N D: alpha / (alpha + beta)."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def theta(self) -> Array:
        """[5] fp64: a, b, e, alpha, beta of the objective."""
        return np.array([np.log(self.a_coef), np.log(self.b_coef), np.log(self.e), self.alpha, self.beta])

    def loss(self, n_params: Array | float, d_tokens: Array | float) -> Array:
        """L(N, D) in nats per token."""
        return np.asarray(
            self.e + self.a_coef * np.power(n_params, -self.alpha) + self.b_coef * np.power(d_tokens, -self.beta)
        )


class Problem(CentredProblem):
    """The objective on centred logs, for a batch of weights or of targets.

    Args:
        n_params, d_tokens, loss: [runs] fp64.
        weights: [m, runs] fp64 counts of each row per problem, or None for ones.
        log_loss: [m, runs] fp64 targets per problem, or None for ln loss.
    """

    def __init__(
        self,
        n_params: Array,
        d_tokens: Array,
        loss: Array,
        weights: Array | None = None,
        log_loss: Array | None = None,
    ) -> None:
        super().__init__(n_params, d_tokens, np.log(loss)[None] if log_loss is None else log_loss, weights)
        ones = np.ones_like(self.x)
        self.powers_x = np.stack([ones, self.x, self.x**2], axis=1)
        self.powers_z = np.stack([ones, self.z, self.z**2], axis=1)
        self.mixed = np.stack([ones, self.x, self.z, self.x * self.z], axis=1)
        self.e_floor = float(np.log(E_FLOOR * loss.min()))

    def residuals(self, theta: Array) -> tuple[Array, Array, Array, Array]:
        """theta [m, 5] centred -> prediction of ln L [m, runs] and the three terms' shares of L, [m, runs] each."""
        a, b, e, alpha, beta = theta.T
        third = _exp(np.maximum(e, self.e_floor))[:, None]
        first = _exp(a[:, None] - alpha[:, None] * self.x)
        second = _exp(b[:, None] - beta[:, None] * self.z)
        total = first + second + third
        return np.log(total), first / total, second / total, third / total

    def __call__(self, theta: Array, which: np.ndarray) -> tuple[Array, Array]:
        """Scaled objective [m] and gradient [m, 5] (both divided by delta^2)."""
        predicted, p1, p2, p3 = self.residuals(theta)
        value, psi, _ = self.terms(predicted, which)
        s1, s2 = psi * p1, psi * p2
        free = theta[:, 2] > self.e_floor
        gradient = np.stack(
            [s1.sum(1), s2.sum(1), np.where(free, (psi * p3).sum(1), 0.0), -s1 @ self.x, -s2 @ self.z], axis=1
        )
        return value, gradient

    def curved(self, theta: Array, which: np.ndarray) -> tuple[Array, Array, Array]:
        """Scaled objective [m], gradient [m, 5] and Hessian [m, 5, 5].

        With shares p_k of the terms and g_k their logs' gradients, the gradient of ln L is sum_k p_k g_k and its
        Hessian sum_k p_k g_k g_k^T - (grad)(grad)^T.
        """
        predicted, p1, p2, p3 = self.residuals(theta)
        value, psi, inside = self.terms(predicted, which)
        inside -= psi
        q1, q2, q3, s1, s2 = inside * p1, inside * p2, inside * p3, psi * p1, psi * p2
        pure1, pure2 = (q1 * p1 + s1) @ self.powers_x, (q2 * p2 + s2) @ self.powers_z
        mixed, third1, third2 = (q1 * p2) @ self.mixed, (q1 * p3) @ self.powers_x, (q2 * p3) @ self.powers_z
        first, second, third = s1 @ self.powers_x, s2 @ self.powers_z, np.einsum("mi,mi->m", psi, p3)
        third33 = np.einsum("mi,mi->m", q3, p3) + third
        free = theta[:, 2] > self.e_floor
        third, third1, third2 = np.where(free, third, 0.0), third1 * free[:, None], third2 * free[:, None]
        third33 = np.where(free, third33, 1.0)
        gradient = np.stack([first[:, 0], second[:, 0], third, -first[:, 1], -second[:, 1]], axis=1)
        hessian = np.empty((len(theta), 5, 5))
        for (i, j), entry in {
            (0, 0): pure1[:, 0], (0, 3): -pure1[:, 1], (3, 3): pure1[:, 2],
            (1, 1): pure2[:, 0], (1, 4): -pure2[:, 1], (4, 4): pure2[:, 2],
            (0, 1): mixed[:, 0], (1, 3): -mixed[:, 1], (0, 4): -mixed[:, 2], (3, 4): mixed[:, 3],
            (0, 2): third1[:, 0], (2, 3): -third1[:, 1], (1, 2): third2[:, 0], (2, 4): -third2[:, 1],
            (2, 2): third33,
        }.items():  # fmt: skip
            hessian[:, i, j] = hessian[:, j, i] = entry
        return value, gradient, hessian

    def centre(self, theta: Array) -> Array:
        """[m, 5] of the published form -> centred logs."""
        out = theta.copy()
        out[:, 0] -= out[:, 3] * self.n_mean
        out[:, 1] -= out[:, 4] * self.d_mean
        return out

    def uncentre(self, theta: Array) -> Array:
        """[m, 5] of centred logs -> the published form; e not below its floor."""
        out = theta.copy()
        out[:, 0] += out[:, 3] * self.n_mean
        out[:, 1] += out[:, 4] * self.d_mean
        out[:, 2] = np.maximum(out[:, 2], self.e_floor)
        return out

    def minimize(self, start: Array, max_iterations: int = 500) -> BatchMinimum:
        """Minimises every problem from its start, [m, 5] centred, by BFGS: for starts that are far away."""
        return minimize_batch(self, start, GRADIENT_TOLERANCE * self.gradient_scale(), max_iterations)

    def refine(self, start: Array) -> BatchMinimum:
        """Minimises every problem from a start that is near, [m, 5] centred, by Newton steps."""
        return newton_batch(self.curved, start, GRADIENT_TOLERANCE * self.gradient_scale())


def _exp(exponent: Array) -> Array:
    """exp that stays finite for the trial points of a line search."""
    return np.exp(np.minimum(exponent, LARGEST_EXPONENT))


def huber_objective(table: RunTable, e: float, a_coef: float, b_coef: float, alpha: float, beta: float) -> float:
    """Sum over rows of Huber(delta = 1e-3) of the log residual, at given constants."""
    problem = Problem(table.n, table.d, table.loss)
    theta = problem.centre(np.array([[np.log(a_coef), np.log(b_coef), np.log(e), alpha, beta]]))
    return float(problem(theta, np.zeros(1, dtype=np.int64))[0][0]) * DELTA**2


def fit_parametric(table: RunTable, starts: int = STARTS, seed: int = 0) -> ParametricFit:
    """Fits approach 3.

    Args:
        starts: seeded starts, spread over exponents .05 to 1 and shares of E from .05 to .95 of the lowest loss.

    Raises:
        FitError: fewer than 6 rows, or sizes or tokens that do not vary, or a fit that is not certified
            (gradient too large, or starts that do not agree).
    """
    require_rows(table)
    problem = Problem(table.n, table.d, table.loss)
    found = problem.minimize(_starts(problem, table.loss, starts, seed))
    value, gradient, theta = _polish(problem, found)
    agreeing = count_agreeing(found.value, value, len(table))
    relative = float(np.abs(gradient).max() / problem.gradient_scale())
    certify(relative, agreeing, starts)
    predicted = problem.residuals(theta[None])[0][0]
    a, b, e, alpha, beta = problem.uncentre(theta[None])[0]
    limits = flags(float(theta[2]) <= problem.e_floor + 1e-6, float(alpha), float(beta))
    return ParametricFit(
        e=float(np.exp(e)),
        a_coef=float(np.exp(a)),
        b_coef=float(np.exp(b)),
        alpha=float(alpha),
        beta=float(beta),
        objective=value * DELTA**2,
        gradient=relative,
        agreeing=agreeing,
        starts=starts,
        residuals=predicted - np.log(table.loss),
        flags=limits,
    )


def require_rows(table: RunTable, form: str = "parametric") -> None:
    """Raises FitError unless there are 6 runs or more with 3 distinct N and 3 distinct D."""
    if len(table) < MIN_ROWS:
        raise FitError(f"{form} needs {MIN_ROWS} runs or more for its constants, got {len(table)}")
    for name, values in (("N", table.n), ("D", table.d)):
        if len(np.unique(np.round(np.log(values), 6))) < 3:
            raise FitError(f"{form} needs 3 distinct {name} or more; add runs that differ in {name}")
    if np.ptp(np.log(table.c)) < BUDGET_GAP:
        raise FitError(f"{form} needs runs at several budgets; all have {table.c[0]:.3g} FLOPs")
    if np.ptp(np.log(table.loss)) < SAME_LOSS:
        raise FitError(f"{form} cannot tell anything from one loss in all runs ({table.loss[0]:.4g}); check its column")


def _starts(problem: Problem, loss: Array, count: int, seed: int) -> Array:
    """[count, 5] centred: exponents and shares drawn, then a and b set so that the surface passes the mean loss."""
    generator = np.random.default_rng(seed)
    alpha = np.exp(generator.uniform(np.log(0.05), np.log(1.0), count))
    beta = np.exp(generator.uniform(np.log(0.05), np.log(1.0), count))
    floor = loss.min() * generator.uniform(0.05, 0.95, count)
    share = generator.uniform(0.1, 0.9, count)
    rest = np.exp(np.log(loss).mean()) - floor
    return np.stack([np.log(share * rest), np.log((1 - share) * rest), np.log(floor), alpha, beta], axis=1)


def _polish(problem: Problem, found: BatchMinimum) -> tuple[float, Array, Array]:
    """Best of the batch, then L-BFGS-B from there with tolerances tight enough for the scaled objective."""
    one = np.zeros(1, dtype=np.int64)

    def scalar(theta: Array) -> tuple[float, Array]:
        value, gradient = problem(theta[None], one)
        return float(value[0]), gradient[0]

    best = found.x[int(np.argmin(found.value))]
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 20}
    result = minimize(scalar, best, jac=True, method="L-BFGS-B", options=options)
    theta = np.asarray(result.x) if result.fun < found.value.min() else best
    value, gradient = scalar(theta)
    return value, gradient, theta


def count_agreeing(values: Array, best: float, rows: int) -> int:
    """Starts whose objective, values [starts], ended within 1e-5 (relative) of the best."""
    return int(np.sum(values <= best * (1 + AGREEMENT) + 1e-12 * rows))


def certify(relative_gradient: float, agreeing: int, starts: int, form: str = "parametric") -> None:
    """Raises FitError for a fit that did not converge: its gradient is not small, or no other start agrees."""
    if not relative_gradient <= 10 * GRADIENT_TOLERANCE:
        raise FitError(f"{form} did not converge: relative gradient {relative_gradient:.1e} at the best point")
    if agreeing < min(MIN_AGREEING, starts):
        raise FitError(
            f"{form} did not converge: {agreeing} of {starts} starts reach the best objective; use more starts"
        )


def flags(e_at_floor: bool, alpha: float, beta: float) -> tuple[str, ...]:
    """What limits a surface with these constants, in words."""
    found = []
    if e_at_floor:
        found.append("E at its bound (0): these runs do not show an irreducible loss")
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value <= 0:
            found.append(f"{name} is not positive: loss does not fall with {'N' if name == 'alpha' else 'D'}")
        elif value > 2:
            found.append(f"{name} above 2: not identified by these runs")
    return tuple(found)
