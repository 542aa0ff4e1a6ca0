"""Size and tokens when inference counts: the cheapest model of a given loss over training and I tokens served.

    minimise  k(N) N D + 2 N I   subject to   L(N, D) = target

(Sardana et al. 2024, arXiv 2401.00448, equation 2: 6 N D of training, 2 N of inference a token.) I = 0 is the
compute-optimal point of that loss. The more tokens are served, the smaller the model and the longer its training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import NO_INTERVAL, Interval, interval
from sweeps.scaling.bootstrap_parametric import ParametricReplicates
from sweeps.scaling.kaplan import KaplanFit, KaplanReplicates
from sweeps.scaling.optimum import FlopRule
from sweeps.scaling.surfaces import Surface
from sweeps.scaling.table import Array, FitError

# ln N is searched from the size that needs endless tokens to this many times it, in golden sections.
SPAN, SECTIONS = 40.0, 120
FORWARD_FLOPS = 2.0
GOLDEN = (np.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class InferenceOptimum:
    """The cheapest model of a loss, with 95% intervals (NaN without replicates).

    Attributes:
        target_loss: nats per token. inference_tokens: I.
        n_opt: parameters. d_opt: tokens. training_flops, inference_flops: what each part costs.
    """

    target_loss: float
    inference_tokens: float
    n_opt: float
    d_opt: float
    training_flops: float
    inference_flops: float
    n_interval: Interval
    d_interval: Interval
    total_interval: Interval

    @property
    def total_flops(self) -> float:
        """Training and inference."""
        return self.training_flops + self.inference_flops


def cheapest(theta: Array, rule: FlopRule, target: Array, inference_tokens: float) -> tuple[Array, Array, Array]:
    """Surfaces [m, 5] (ln A, ln B, ln E, alpha, beta), target losses [m] -> N, D and FLOPs in all, [m] each.

    NaN where a surface does not reach its target: E at or above it, or an exponent that is not positive.
    """
    log_a, log_b, log_e, alpha, beta = theta.T
    room = target - np.exp(log_e)
    with np.errstate(all="ignore"):
        reachable = (room > 0) & (alpha > 0) & (beta > 0)
        # Below this size A / N^alpha alone is too much.
        least = (log_a - np.log(room)) / alpha

        def tokens(log_n: Array) -> Array:
            return np.exp((log_b - np.log(room - np.exp(log_a - alpha * log_n))) / beta)

        def log_cost(log_n: Array) -> Array:
            n = np.exp(log_n)
            cost = np.log(n * (rule.flops_per_parameter_token(n) * tokens(log_n) + FORWARD_FLOPS * inference_tokens))
            return np.where(np.isfinite(cost), cost, np.inf)

        low, high = least + 1e-12 * np.abs(least), least + SPAN / alpha
        for _ in range(SECTIONS):
            left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
            smaller = log_cost(left) < log_cost(right)
            low, high = np.where(smaller, low, left), np.where(smaller, right, high)
        log_n = 0.5 * (low + high)
        found = np.exp(log_n), tokens(log_n), np.exp(log_cost(log_n))
    return tuple(np.where(reachable, values, np.nan) for values in found)  # type: ignore[return-value]


def inference_optimum(
    model: Surface | KaplanFit,
    target_loss: float,
    inference_tokens: float,
    replicates: ParametricReplicates | KaplanReplicates | None = None,
) -> InferenceOptimum:
    """The cheapest size and tokens for a loss, when `inference_tokens` will be served.

    Args:
        model: a fitted surface with its FLOP rule.
        replicates: its bootstrap, for intervals.

    Raises:
        FitError: the surface does not reach the loss. ValueError: a negative number of tokens, a loss not above 0.
    """
    if not (inference_tokens >= 0 and np.isfinite(inference_tokens)):
        raise ValueError(f"inference tokens must be 0 or more, got {inference_tokens:g}")
    if not target_loss > 0:
        raise ValueError(f"the target loss must be positive, got {target_loss:g}")
    theta, target = _surface(model, target_loss)
    n, d, total = (float(v[0]) for v in cheapest(theta, model.rule, target, inference_tokens))
    if not np.isfinite(n):
        raise FitError(
            f"this fit does not reach a loss of {target_loss:g} at any size: its irreducible loss is {model.e:.4g};"
            " raise the target loss"
        )
    intervals = [NO_INTERVAL] * 3
    if replicates is not None:
        draws, targets = _draws(replicates, target_loss)
        intervals = [interval(values) for values in cheapest(draws, replicates.rule, targets, inference_tokens)]
    served = FORWARD_FLOPS * n * inference_tokens
    return InferenceOptimum(target_loss, inference_tokens, n, d, total - served, served, *intervals)


def _surface(model: Surface | KaplanFit, target_loss: float) -> tuple[Array, Array]:
    if isinstance(model, KaplanFit):
        return model.surface[None], np.array([target_loss ** (1 / model.alpha_d)])
    return model.fit.theta[None], np.array([target_loss])


def _draws(replicates: ParametricReplicates | KaplanReplicates, target_loss: float) -> tuple[Array, Array]:
    if isinstance(replicates, KaplanReplicates):
        return replicates.surface, target_loss ** (1 / replicates.gamma)
    return replicates.theta, np.full(len(replicates.theta), target_loss)
