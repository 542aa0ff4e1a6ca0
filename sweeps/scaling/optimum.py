"""The compute-optimal point of a surface L(N, D) when FLOPs are not exactly 6 N D.

C = k(N) N D. With `6N` counting k is 6; with attention counted, k falls towards 6 as models grow; with Kaplan's count
against the total N it rises.
The rule is read off the run table, so the optimum is under the table's own convention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.table import Array, RunTable

CONSTANT_WITHIN = 0.01
MAX_STEPS = 60
CLOSE = 1e-13  # of ln N: rounding is all that moves it then


@dataclass(frozen=True)
class FlopRule:
    """FLOPs per parameter and token as a function of N: k(N) = base + sign exp(log_scale + power ln N).

    Attributes:
        base: limit for large N.
        sign: 0 for a constant k, 1 for the excess of attention's FLOPs over 6.
    """

    base: float = 6.0
    sign: float = 0.0
    log_scale: float = 0.0
    power: float = 0.0

    def flops_per_parameter_token(self, n_params: Array) -> Array:
        """k(N), [...] -> [...]."""
        return self.base + self.sign * np.exp(self.log_scale + self.power * np.log(n_params))

    def tokens(self, n_params: Array, c_flops: float) -> Array:
        """D that spends C at N, [...] -> [...] tokens."""
        return c_flops / (self.flops_per_parameter_token(n_params) * n_params)


class ByOptimum(ABC):
    """N*, D* and the loss at a budget, of a fit that finds all three at once."""

    @abstractmethod
    def _optimum(self, c_flops: float) -> tuple[float, float, float]: ...

    def n_opt(self, c_flops: float) -> float:
        """N*, parameters."""
        return self._optimum(c_flops)[0]

    def d_opt(self, c_flops: float) -> float:
        """D*, tokens."""
        return self._optimum(c_flops)[1]

    def loss_opt(self, c_flops: float) -> float:
        """Loss at the optimum, nats per token."""
        return self._optimum(c_flops)[2]


def flop_rule(table: RunTable) -> FlopRule:
    """Reads k(N) off a table: constant when within 1%, else 6 plus a power law, else a power law."""
    k, log_n = table.c / (table.n * table.d), np.log(table.n)
    centre = float(np.exp(np.log(k).mean()))
    if np.abs(k / centre - 1).max() <= CONSTANT_WITHIN:
        return FlopRule(base=centre)
    excess = k - 6.0
    base = 6.0 if (excess > 1e-3).all() else 0.0
    power, log_scale = np.polyfit(log_n, np.log(k - base), 1)
    return FlopRule(base, 1.0, float(log_scale), float(power))


def optimum(theta: Array, rule: FlopRule, c_flops: float) -> tuple[Array, Array, Array]:
    """Compute-optimal N, D and loss of surfaces at a budget.

    Args:
        theta: [m, 5] fp64: ln A, ln B, ln E, alpha, beta.
        c_flops: budget.

    Returns:
        n [m] parameters, d [m] tokens, loss [m] nats per token; NaN where a surface has no interior optimum.

    With constant k: N* = G (C/k)^(beta/(alpha+beta)), G = (alpha A / (beta B))^(1/(alpha+beta)) (Hoffmann et al.
    2022, equation 4). Otherwise the root of the derivative along C is refined from that start by Newton steps.
    """
    log_a, log_b, log_e, alpha, beta = theta.T
    valid = (alpha > 0) & (beta > 0)
    with np.errstate(all="ignore"):
        log_g = (np.log(alpha) + log_a - np.log(beta) - log_b) / (alpha + beta)
        x = log_g + beta / (alpha + beta) * np.log(c_flops / rule.base if rule.base else c_flops / 6.0)
        if rule.sign:
            x = _refine(x, theta, rule, c_flops)
        n = np.where(valid, np.exp(x), np.nan)
        d = rule.tokens(n, c_flops)
        loss = np.exp(log_e) + np.exp(log_a - alpha * np.log(n)) + np.exp(log_b - beta * np.log(d))
    return n, d, loss


def _refine(x: Array, theta: Array, rule: FlopRule, c_flops: float) -> Array:
    """Fixed point of alpha A N^-alpha = beta B D^-beta (1 + dln k / dln N), damped; [m] ln N -> [m] ln N."""
    log_a, log_b, _, alpha, beta = theta.T
    for _ in range(MAX_STEPS):
        n = np.exp(x)
        k = rule.flops_per_parameter_token(n)
        slope = rule.power * (k - rule.base) / k
        log_d = np.log(c_flops) - np.log(k) - x
        gap = np.log(alpha) + log_a - alpha * x - (np.log(beta) + log_b - beta * log_d + np.log1p(slope))
        step = gap / (alpha + beta * (1 + slope))
        x = x + step
        if not (np.abs(step) > CLOSE).any():  # NaN, of a surface without an optimum, waits for nothing
            break
    return x
