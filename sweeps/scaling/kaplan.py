"""Kaplan et al. 2020 (arXiv 2001.08361), equation 1.5: L(N, D) = [ (N_c / N)^(alpha_N / alpha_D) + D_c / D ]^alpha_D.

Fitted like approach 3: a sum of Huber losses (delta 1e-3) of the residual of ln L, from seeded starts in one batch with
an exact gradient and Hessian, certified by the gradient and by starts that agree.

The form has no irreducible loss: it falls to 0 with N and D, so far beyond the grid it promises too much. At C = k N D
its optimum has N* ~ C^(1 / (1 + alpha_N / alpha_D)), .56 with Kaplan's constants; the paper's .73 comes from another
construction (runs at the critical batch size, stopped short of convergence), not from this surface.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import BATCH_VALUES, choose_scheme, draw_counts, draw_noise, draw_sd, residual_noise
from sweeps.scaling.huber import DELTA, CentredProblem
from sweeps.scaling.newton import newton_batch
from sweeps.scaling.optimum import ByOptimum, FlopRule, flop_rule, optimum
from sweeps.scaling.parametric import GRADIENT_TOLERANCE, certify, count_agreeing, require_rows
from sweeps.scaling.table import Array, RunTable

STARTS = 48
NO_FLOOR = "Kaplan's form has no irreducible loss: far beyond the grid it predicts too low a loss"


class KaplanProblem(CentredProblem):
    """The objective on centred logs, theta = [p, q, rho, ln gamma]: ln L = gamma ln(exp(p - rho x) + exp(q - z)).

    gamma is alpha_D, rho is alpha_N / alpha_D, x and z are ln N and ln D less their means.
    Its targets are ln loss.
    """

    def predict(self, theta: Array) -> tuple[Array, Array]:
        """theta [m, 4] -> ln of the bracket and the first term's share of it, [m, runs] each."""
        p, q, rho, _ = theta.T
        first, second = p[:, None] - rho[:, None] * self.x, q[:, None] - self.z
        bracket = np.logaddexp(first, second)
        return bracket, np.exp(first - bracket)

    def curved(self, theta: Array, which: np.ndarray) -> tuple[Array, Array, Array]:
        """Objective over delta^2 [m], gradient [m, 4] and Hessian [m, 4, 4]."""
        gamma = np.exp(theta[:, 3])[:, None]
        bracket, share = self.predict(theta)
        value, psi, inside = self.terms(gamma * bracket, which)
        slopes = np.stack([gamma * share, gamma * (1 - share), -gamma * share * self.x, gamma * bracket], axis=1)
        gradient = np.einsum("mkr,mr->mk", slopes, psi)
        hessian = np.matmul(slopes * inside[:, None], slopes.transpose(0, 2, 1))
        # Second derivatives of ln L: the bracket's curvature is share (1 - share) along (1, -1, -x).
        bend = psi * gamma * share * (1 - share)
        along = np.stack([np.ones_like(self.x), -np.ones_like(self.x), -self.x])
        hessian[:, :3, :3] += np.einsum("mr,ir,jr->mij", bend, along, along)
        hessian[:, 3, :] += gradient
        hessian[:, :3, 3] += gradient[:, :3]
        return value, gradient, hessian

    def surface(self, theta: Array) -> Array:
        """theta -> [m, 5] of L^(1 / gamma) = A N^-rho + B / D: ln A, ln B, ln 0, rho, 1, as `optimum` takes it."""
        p, q, rho, _ = theta.T
        ones = np.ones_like(p)
        return np.stack([p + rho * self.n_mean, q + self.d_mean, np.full_like(p, -np.inf), rho, ones], axis=1)


@dataclass(frozen=True)
class KaplanFit(ByOptimum):
    """Kaplan's form with its FLOP rule.

    Attributes:
        alpha_n, alpha_d, n_c, d_c: the published form's constants (n_c in parameters, d_c in tokens).
        objective: sum of Huber losses of ln L. gradient: largest component over the largest possible.
        agreeing, starts: starts that ended within 1e-5 (relative) of the best objective.
        residuals: [runs] fp64, ln L fitted - ln L measured.
        surface: [5] fp64, L^(1 / alpha_d) as a surface, see `KaplanProblem.surface`.
    """

    alpha_n: float
    alpha_d: float
    n_c: float
    d_c: float
    objective: float
    gradient: float
    agreeing: int
    starts: int
    residuals: Array
    surface: Array
    rule: FlopRule
    flags: tuple[str, ...] = (NO_FLOOR,)

    @property
    def a(self) -> float:
        """Exponent of N* in C when C is proportional to N D."""
        return self.alpha_d / (self.alpha_n + self.alpha_d)

    @property
    def b(self) -> float:
        """Exponent of D* in C when C is proportional to N D."""
        return self.alpha_n / (self.alpha_n + self.alpha_d)

    @property
    def e(self) -> float:
        """0: the form has no irreducible loss."""
        return 0.0

    @property
    def parameters(self) -> dict[str, float | str]:
        """The fit's constants, for reports."""
        return {
            "alpha_n": self.alpha_n, "alpha_d": self.alpha_d, "n_c": self.n_c, "d_c": self.d_c,
            "objective": self.objective, "gradient": self.gradient,
        }  # fmt: skip

    def loss(self, n_params: Array | float, d_tokens: Array | float) -> Array:
        """L(N, D) in nats per token."""
        return kaplan_loss(n_params, d_tokens, self.alpha_n, self.alpha_d, self.n_c, self.d_c)

    def _optimum(self, c_flops: float) -> tuple[float, float, float]:
        n, d, bracket = optimum(self.surface[None], self.rule, c_flops)
        return float(n[0]), float(d[0]), float(bracket[0]) ** self.alpha_d

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> float:
        """Loss of any shape, nats per token."""
        return float(self.loss(n_params, d_tokens))


@dataclass(frozen=True)
class KaplanReplicates:
    """Replicates. surface: [k, 5] fp64 and gamma: [k] fp64, see `KaplanProblem`; NaN where one did not converge."""

    surface: Array
    gamma: Array
    rule: FlopRule
    noise_sd: Array
    scheme: str
    failed: int

    @property
    def a(self) -> Array:
        return 1 / (1 + self.surface[:, 3])

    @property
    def b(self) -> Array:
        return self.surface[:, 3] / (1 + self.surface[:, 3])

    @property
    def e(self) -> Array:
        """[k] NaN: the form has none."""
        return np.full(len(self.gamma), np.nan)

    def decision(self, c_flops: float) -> tuple[Array, Array, Array]:
        """N*, D* and loss at the optimum for a budget, [k] each."""
        n, d, bracket = optimum(self.surface, self.rule, c_flops)
        return n, d, bracket**self.gamma

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> Array:
        """Loss of a planned run, [k]."""
        log_a, log_b, _, rho, _ = self.surface.T
        with np.errstate(invalid="ignore"):  # of replicates that did not converge
            return np.exp(self.gamma * np.logaddexp(log_a - rho * np.log(n_params), log_b - np.log(d_tokens)))


def kaplan_loss(
    n_params: Array | float, d_tokens: Array | float, alpha_n: float, alpha_d: float, n_c: float, d_c: float
) -> Array:
    """Equation 1.5 at given constants: nats per token. The paper's: .076, .103, 6.4e13, 1.8e13 (its table 2)."""
    return np.power(np.power(n_c / np.asarray(n_params), alpha_n / alpha_d) + d_c / np.asarray(d_tokens), alpha_d)


def fit_kaplan(table: RunTable, starts: int = STARTS, seed: int = 0) -> KaplanFit:
    """Fits Kaplan's form.

    Raises:
        FitError: fewer than 6 rows, sizes or tokens that do not vary, or a fit that is not certified.
    """
    require_rows(table, "kaplan")
    log_loss = np.log(table.loss)
    problem = KaplanProblem(table.n, table.d, log_loss[None])
    tolerance = 1e-2 * GRADIENT_TOLERANCE * problem.gradient_scale()
    found = newton_batch(problem.curved, _starts(log_loss, starts, seed), tolerance)
    best = int(np.argmin(found.value))
    value, theta = float(found.value[best]), found.x[best : best + 1]
    agreeing = count_agreeing(found.value, value, len(table))
    relative = float(found.gradient_norm[best] / problem.gradient_scale())
    certify(relative, agreeing, starts, "kaplan")
    gamma, rho = float(np.exp(theta[0, 3])), float(theta[0, 2])
    limits = [NO_FLOOR] + (["alpha_N is not positive: loss does not fall with N"] if rho <= 0 else [])
    with np.errstate(over="ignore"):
        n_c = float(np.exp(problem.n_mean + theta[0, 0] / rho)) if rho > 0 else float("nan")
        d_c = float(np.exp(problem.d_mean + theta[0, 1]))
    return KaplanFit(
        alpha_n=gamma * rho,
        alpha_d=gamma,
        n_c=n_c,
        d_c=d_c,
        objective=value * DELTA**2,
        gradient=relative,
        agreeing=agreeing,
        starts=starts,
        residuals=gamma * problem.predict(theta)[0][0] - log_loss,
        surface=problem.surface(theta)[0],
        rule=flop_rule(table),
        flags=tuple(limits),
    )


def _starts(log_loss: Array, count: int, seed: int) -> Array:
    """[count, 4]: gamma and rho drawn, shares drawn, then p and q set so that the surface passes the mean loss."""
    generator = np.random.default_rng(seed)
    gamma = np.exp(generator.uniform(np.log(0.03), np.log(0.6), count))
    rho = np.exp(generator.uniform(np.log(0.2), np.log(3.0), count))
    share = generator.uniform(0.1, 0.9, count)
    bracket = log_loss.mean() / gamma
    return np.stack([bracket + np.log(share), bracket + np.log1p(-share), rho, np.log(gamma)], axis=1)


def bootstrap_kaplan(
    table: RunTable, fit: KaplanFit, k: int = 1000, seed: int = 0, scheme: str = "auto"
) -> KaplanReplicates:
    """Refits on k replicates, clustered by run, each started from the fit; schemes as in `bootstrap`."""
    generator = np.random.default_rng(seed)
    used = choose_scheme(table, scheme)
    sd = draw_sd(residual_noise(fit.residuals, 4), k, generator)
    log_loss, fitted = np.log(table.loss)[None], np.log(table.loss) + fit.residuals
    theta = np.full((k, 4), np.nan)
    size = max(1, BATCH_VALUES // len(table))
    for first in range(0, k, size):
        part = sd[first : first + size]
        if used == "rows":
            problem = KaplanProblem(table.n, table.d, log_loss, draw_counts(table, len(part), generator))
        else:
            noise = part[:, None] * draw_noise(table, len(part), generator)
            problem = KaplanProblem(table.n, table.d, fitted + noise)
        log_a, log_b, _, rho, _ = fit.surface
        start = [log_a - rho * problem.n_mean, log_b - problem.d_mean, rho, np.log(fit.alpha_d)]
        tolerance = GRADIENT_TOLERANCE * problem.gradient_scale()
        found = newton_batch(problem.curved, np.tile(start, (len(part), 1)), tolerance)
        theta[first : first + size] = np.where(found.gradient_norm[:, None] <= 10 * tolerance, found.x, np.nan)
    surface = problem.surface(theta)
    failed = int(np.isnan(theta[:, 0]).sum())
    return KaplanReplicates(surface, np.exp(theta[:, 3]), fit.rule, sd, used, failed)
