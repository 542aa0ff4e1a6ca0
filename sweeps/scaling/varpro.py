"""L(N, D) = E + A / N^alpha + B / D^beta fitted to the loss itself, by variable projection (Golub and Pereyra 1973).

    minimise  sum_i Huber_delta( E + A N_i^-alpha + B D_i^-beta - L_i ),   delta = 1e-3 nats

For given alpha and beta the surface is linear in E, A and B and the objective is convex in them, so the search is over
two exponents: the inner problem is solved at every point of a grid of (alpha, beta), in one batch, and the best points
are refined. The refinement takes Newton steps in all five constants; eliminating E, A and B from such a step leaves the
Newton step of the projected objective, so both end where its gradient is zero. Against approach 3's objective
(`parametric`), which weighs ln L, this one weighs nats equally at every loss.
"""

from __future__ import annotations

import numpy as np

from sweeps.scaling.huber import DELTA, CentredProblem
from sweeps.scaling.minimize import BatchMinimum
from sweeps.scaling.newton import newton_batch
from sweeps.scaling.parametric import (
    E_FLOOR,
    GRADIENT_TOLERANCE,
    LARGEST_EXPONENT,
    ParametricFit,
    certify,
    count_agreeing,
    flags,
    require_rows,
)
from sweeps.scaling.table import Array, FitError, RunTable

GRID = np.geomspace(0.02, 2.0, 28)
REFINED = 64


class LinearProblem(CentredProblem):
    """The objective on centred logs, theta = [A', B', E, alpha, beta], A' and B' the terms at the mean ln N and ln D.

    Args:
        n_params, d_tokens, loss: [runs] fp64.
        weights: [m, runs] fp64 counts of each row per problem, or None for ones.
        log_loss: [m, runs] fp64 targets per problem (their logs), or None for the losses given.
    """

    def __init__(
        self,
        n_params: Array,
        d_tokens: Array,
        loss: Array,
        weights: Array | None = None,
        log_loss: Array | None = None,
    ) -> None:
        super().__init__(n_params, d_tokens, loss[None] if log_loss is None else np.exp(log_loss), weights)
        self.e_floor = float(E_FLOOR * loss.min())

    def predict(self, theta: Array) -> tuple[Array, Array, Array]:
        """theta [m, 5] -> loss, N^-alpha and D^-beta relative to their values at the means, [m, runs] each."""
        first, second, e, alpha, beta = theta.T
        u = np.exp(np.minimum(-alpha[:, None] * self.x, LARGEST_EXPONENT))
        v = np.exp(np.minimum(-beta[:, None] * self.z, LARGEST_EXPONENT))
        return first[:, None] * u + second[:, None] * v + np.maximum(e, self.e_floor)[:, None], u, v

    def curved(self, theta: Array, which: np.ndarray) -> tuple[Array, Array, Array]:
        """Scaled objective [m], gradient [m, 5] and Hessian [m, 5, 5]."""
        predicted, u, v = self.predict(theta)
        value, psi, inside = self.terms(predicted, which)
        first, second = theta[:, 0, None], theta[:, 1, None]
        xu, zv = self.x * u, self.z * v
        slopes = np.stack([u, v, np.ones_like(u), -first * xu, -second * zv], axis=1)
        gradient = np.einsum("mkr,mr->mk", slopes, psi)
        hessian = np.matmul(slopes * inside[:, None], slopes.transpose(0, 2, 1))
        for i, j, entry in (
            (0, 3, -(psi * xu).sum(1)), (3, 3, theta[:, 0] * (psi * self.x * xu).sum(1)),
            (1, 4, -(psi * zv).sum(1)), (4, 4, theta[:, 1] * (psi * self.z * zv).sum(1)),
        ):  # fmt: skip
            hessian[:, i, j] += entry
            if i != j:
                hessian[:, j, i] += entry
        held = (theta[:, 2] <= self.e_floor) & (gradient[:, 2] >= 0)
        gradient[held, 2] = 0.0
        hessian[held, 2, :] = hessian[held, :, 2] = 0.0
        hessian[held, 2, 2] = 1.0
        return value, gradient, hessian

    def project(self, alpha: Array, beta: Array) -> tuple[Array, Array]:
        """Best A', B' and E at given exponents, [m] each -> objective [m] and theta [m, 5].

        Least squares first, then Newton steps of the Huber objective, which is convex here.
        """
        exponents = np.stack([alpha, beta], axis=1)
        theta = np.concatenate([np.zeros((len(alpha), 3)), exponents], axis=1)
        _, u, v = self.predict(theta)
        columns = np.stack([u, v, np.ones_like(u)], axis=1)
        normal = np.matmul(columns, columns.transpose(0, 2, 1))
        ridge = 1e-10 * np.einsum("mii->m", normal)[:, None, None] * np.eye(3)
        theta[:, :3] = np.linalg.solve(normal + ridge, (columns @ self.target[0])[..., None])[..., 0]
        theta[:, 2] = np.maximum(theta[:, 2], self.e_floor)

        def inner(linear: Array, which: np.ndarray) -> tuple[Array, Array, Array]:
            value, gradient, hessian = self.curved(np.concatenate([linear, exponents[which]], axis=1), which * 0)
            return value, gradient[:, :3], hessian[:, :3, :3]

        found = newton_batch(inner, theta[:, :3], 1e-3 * GRADIENT_TOLERANCE * self.gradient_scale(), 60)
        return found.value, np.concatenate([found.x, exponents], axis=1)

    def refine(self, start: Array) -> BatchMinimum:
        """Minimises every problem from a start that is near, [m, 5], by Newton steps."""
        return newton_batch(self.curved, start, 1e-2 * GRADIENT_TOLERANCE * self.gradient_scale())

    def centre(self, theta: Array) -> Array:
        """[m, 5] of ln A, ln B, ln E, alpha, beta -> this problem's theta."""
        log_a, log_b, log_e, alpha, beta = theta.T
        return np.stack(
            [np.exp(log_a - alpha * self.n_mean), np.exp(log_b - beta * self.d_mean), np.exp(log_e), alpha, beta],
            axis=1,
        )

    def uncentre(self, theta: Array) -> Array:
        """This problem's theta [m, 5] -> ln A, ln B, ln E, alpha, beta; NaN where A or B is not positive."""
        first, second, e, alpha, beta = theta.T
        with np.errstate(invalid="ignore", divide="ignore"):
            log_a, log_b = np.log(first) + alpha * self.n_mean, np.log(second) + beta * self.d_mean
        out = np.stack([log_a, log_b, np.log(np.maximum(e, self.e_floor)), alpha, beta], axis=1)
        return np.where(np.isfinite(out).all(axis=1, keepdims=True), out, np.nan)


def fit_varpro(table: RunTable, refined: int = REFINED) -> ParametricFit:
    """Fits the surface to the losses in nats.

    Args:
        refined: grid points that are refined, the best ones of 28 x 28 exponents from .02 to 2.

    Returns:
        As `fit_parametric`, with the objective of this form (a sum over rows, nats^2).

    Raises:
        FitError: fewer than 6 rows, or sizes or tokens that do not vary, a fit that is not certified, or one in
            which the loss does not fall with N or with D.
    """
    require_rows(table, "parametric_linear")
    problem = LinearProblem(table.n, table.d, table.loss)
    alpha, beta = (axis.ravel() for axis in np.meshgrid(GRID, GRID))
    value, theta = problem.project(alpha, beta)
    found = problem.refine(theta[np.argsort(value)[:refined]])
    best = int(np.argmin(found.value))
    value_at, relative = float(found.value[best]), float(found.gradient_norm[best] / problem.gradient_scale())
    agreeing = count_agreeing(found.value, value_at, len(table))
    certify(relative, agreeing, refined, "parametric_linear")
    constants = problem.uncentre(found.x[best : best + 1])[0]
    if np.isnan(constants[0]):
        raise FitError("parametric_linear: A or B is not positive at the optimum: the loss does not fall with N or D")
    log_a, log_b, log_e, alpha_at, beta_at = (float(c) for c in constants)
    predicted = problem.predict(found.x[best : best + 1])[0][0]
    if (predicted <= 0).any():
        raise FitError("parametric_linear: the fitted loss is not positive at a run; the form does not fit these runs")
    return ParametricFit(
        e=float(np.exp(log_e)),
        a_coef=float(np.exp(log_a)),
        b_coef=float(np.exp(log_b)),
        alpha=alpha_at,
        beta=beta_at,
        objective=value_at * DELTA**2,
        gradient=relative,
        agreeing=agreeing,
        starts=refined,
        residuals=np.log(predicted) - np.log(table.loss),
        flags=flags(float(np.exp(log_e)) <= problem.e_floor * (1 + 1e-6), alpha_at, beta_at),
    )
