"""Bootstrap of approach 3, under either objective; schemes are described in `bootstrap`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import BATCH_VALUES, choose_scheme, draw_counts, draw_noise, draw_sd, residual_noise
from sweeps.scaling.optimum import FlopRule, optimum
from sweeps.scaling.parametric import GRADIENT_TOLERANCE, ParametricFit, Problem
from sweeps.scaling.table import Array, RunTable
from sweeps.scaling.varpro import LinearProblem
from sweeps.scaling.world import World


@dataclass(frozen=True)
class ParametricReplicates:
    """Replicates of approach 3. theta: [k, 5] fp64 (ln A, ln B, ln E, alpha, beta); NaN rows did not converge."""

    theta: Array
    rule: FlopRule
    noise_sd: Array
    scheme: str
    failed: int

    @property
    def a(self) -> Array:
        return self.theta[:, 4] / (self.theta[:, 3] + self.theta[:, 4])

    @property
    def b(self) -> Array:
        return self.theta[:, 3] / (self.theta[:, 3] + self.theta[:, 4])

    @property
    def e(self) -> Array:
        """[k] irreducible loss."""
        return np.exp(self.theta[:, 2])

    def decision(self, c_flops: float) -> tuple[Array, Array, Array]:
        """N*, D* and loss at the optimum for a budget, [k] each."""
        return optimum(self.theta, self.rule, c_flops)

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> Array:
        """Loss of a planned run, [k]."""
        return World(self.theta, self.rule).loss(n_params, d_tokens)


def bootstrap_parametric(
    table: RunTable,
    fit: ParametricFit,
    rule: FlopRule,
    k: int = 1000,
    seed: int = 0,
    scheme: str = "auto",
    kind: type[Problem] | type[LinearProblem] = Problem,
) -> ParametricReplicates:
    """Refits a surface on k replicates, each started from the fit, all in batches.

    Args:
        k: replicates.
        seed: of the resampling; equal seeds give equal intervals.
        kind: the objective: `Problem` (approach 3) or `varpro.LinearProblem`.
    """
    generator = np.random.default_rng(seed)
    used = choose_scheme(table, scheme)
    sd = draw_sd(residual_noise(fit.residuals, 5), k, generator)
    theta = np.full((k, 5), np.nan)
    size = max(1, BATCH_VALUES // len(table))
    for first in range(0, k, size):
        count = min(size, k - first)
        problem = _replicate_problem(table, fit, used, sd[first : first + count], generator, kind)
        start = problem.centre(np.repeat(fit.theta[None], count, axis=0))
        found = problem.refine(start)
        converged = found.gradient_norm <= 10 * GRADIENT_TOLERANCE * problem.gradient_scale()
        theta[first : first + count] = np.where(converged[:, None], problem.uncentre(found.x), np.nan)
    failed = int(np.isnan(theta[:, 0]).sum())
    return ParametricReplicates(theta, rule, sd, used, failed)


def _replicate_problem(
    table: RunTable,
    fit: ParametricFit,
    scheme: str,
    sd: Array,
    generator: np.random.Generator,
    kind: type[Problem] | type[LinearProblem],
) -> Problem | LinearProblem:
    if scheme == "rows":
        return kind(table.n, table.d, table.loss, weights=draw_counts(table, len(sd), generator))
    log_loss = np.log(table.loss) + fit.residuals + sd[:, None] * draw_noise(table, len(sd), generator)
    return kind(table.n, table.d, table.loss, log_loss=log_loss)
