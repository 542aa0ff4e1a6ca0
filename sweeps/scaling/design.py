"""Which cells to run next: those that shrink the interval on a decision most for the FLOPs they cost.

The decision is ln N*(C) or ln L*(C) at a target C under L(N, D) = E + A / N^alpha + B / D^beta. Linearised at constants
theta, a run at (N, D) whose ln loss has sd s adds x x^T / s^2 to the information matrix M, x = d ln L / d theta, and
the variance of a decision with gradient g is g^T M^-1 g (c-optimality; Chaloner and Verdinelli 1995). The theta are
uncertain, so the criterion is the mean of ln(g^T M^-1 g) over bootstrap replicates of the fit: a pseudo-Bayesian
design, in which no single replicate with a huge variance decides.

Cells differ in cost by orders of magnitude. Adding the best gain per FLOP first would spend everything on tiny cells,
the best gain alone everything on one large cell; so the *set* is optimised under a total: greedy by gain / C^p for
several p, then exchanges until no swap of one cell helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.optimum import FlopRule, optimum
from sweeps.scaling.table import Array, FitError

# Exponents p of the greedy starts: gain / C^p.
GREEDY = (0.0, 0.5, 1.0)
# Weak prior sd of ln A, ln B, ln E, alpha, beta: keeps M invertible where the runs say nothing about a constant.
PRIOR_SD = np.array([10.0, 10.0, 3.0, 2.0, 2.0])
STEP = 1e-4
MAX_EXCHANGES = 200
DECISIONS = ("size", "loss")


@dataclass(frozen=True)
class Cells:
    """Runs that exist or could be made: n [m] parameters, d [m] tokens, c [m] FLOPs, fp64 each."""

    n: Array
    d: Array
    c: Array

    def __len__(self) -> int:
        return len(self.n)

    def take(self, rows: Sequence[int]) -> Cells:
        """The cells of these indices."""
        index = np.asarray(rows, dtype=np.int64)
        return Cells(self.n[index], self.d[index], self.c[index])


@dataclass(frozen=True)
class Design:
    """A choice of candidates.

    Attributes:
        rows: indices of the chosen candidates, ascending.
        flops: their sum.
        ratio: expected sd of the decision after over before: geometric mean over the replicates.
    """

    rows: tuple[int, ...]
    flops: float
    ratio: float


def log_loss_jacobian(theta: Array, n_params: Array, d_tokens: Array) -> Array:
    """d ln L / d (ln A, ln B, ln E, alpha, beta): theta [b, 5], n and d [m] -> [b, m, 5]."""
    log_a, log_b, log_e, alpha, beta = (column[:, None] for column in theta.T)
    log_n, log_d = np.log(n_params)[None], np.log(d_tokens)[None]
    first, second = np.exp(log_a - alpha * log_n), np.exp(log_b - beta * log_d)
    third = np.broadcast_to(np.exp(log_e), first.shape)
    total = first + second + third
    first, second, third = first / total, second / total, third / total
    return np.stack([first, second, third, -first * log_n, -second * log_d], axis=-1)


def decision_gradient(theta: Array, rule: FlopRule, target_c: float, decision: str = "size") -> Array:
    """d ln N*(C) / d theta, or of ln L*(C) for `loss`: theta [b, 5] -> [b, 5], by central differences."""
    if decision not in DECISIONS:
        raise ValueError(f"unknown decision {decision!r}; choose from {', '.join(DECISIONS)}")
    which = 0 if decision == "size" else 2
    out = np.empty_like(theta)
    for i in range(theta.shape[1]):
        ends = []
        for sign in (1, -1):
            moved = theta.copy()
            moved[:, i] += sign * STEP
            ends.append(np.log(optimum(moved, rule, target_c)[which]))
        out[:, i] = (ends[0] - ends[1]) / (2 * STEP)
    return out


class Criterion:
    """Mean ln variance of the decision, for any set of candidates on top of the runs there are.

    Args:
        theta: [b, 5] replicates of the fit; those without an interior optimum are left out.
        rule: FLOPs of a run. target_c: FLOPs of the decision. decision: `size` or `loss`.
        runs: the runs there are. candidates: those that could be added.
        noise_sd: sd of ln loss of one run.

    Raises:
        FitError: no replicate has an optimum at the target.
    """

    def __init__(
        self,
        theta: Array,
        rule: FlopRule,
        target_c: float,
        runs: Cells,
        candidates: Cells,
        noise_sd: float,
        decision: str = "size",
    ) -> None:
        gradient = decision_gradient(theta, rule, target_c, decision)
        usable = np.isfinite(gradient).all(axis=1)
        if not usable.any():
            raise FitError(f"no replicate of the fit has an optimum at {target_c:.3g} FLOPs: nothing to design for")
        theta, self.gradient = theta[usable], gradient[usable]
        there = log_loss_jacobian(theta, runs.n, runs.d) / noise_sd
        self.start = there.transpose(0, 2, 1) @ there + np.diag(PRIOR_SD**-2.0)
        self.x = log_loss_jacobian(theta, candidates.n, candidates.d) / noise_sd
        self.cost = candidates.c

    def information(self, rows: Sequence[int]) -> Array:
        """[b, 5, 5]: M with these candidates (a row named twice counts twice)."""
        x = self.x[:, list(rows)]
        return self.start + x.transpose(0, 2, 1) @ x

    def value(self, rows: Sequence[int]) -> float:
        """Mean over replicates of ln(g^T M^-1 g)."""
        solved = np.linalg.solve(self.information(rows), self.gradient[:, :, None])[:, :, 0]
        return float(np.mean(np.log((self.gradient * solved).sum(axis=-1))))

    def with_each(self, rows: Sequence[int]) -> Array:
        """[m]: the value when each candidate in turn is added to `rows`, by the rank-one update of M^-1."""
        inverse = np.linalg.inv(self.information(rows))
        solved = (inverse @ self.gradient[:, :, None])[:, :, 0]
        spread = ((self.x @ inverse) * self.x).sum(axis=-1)
        moved = (self.x @ solved[:, :, None])[:, :, 0]
        left = (self.gradient * solved).sum(axis=-1)[:, None] - moved**2 / (1 + spread)
        return np.mean(np.log(np.maximum(left, 1e-300)), axis=0)


def choose(criterion: Criterion, flops: float, most: int | None = None, keep: Sequence[int] = ()) -> Design:
    """Candidates, each at most once, that make the criterion smallest within `flops` in all.

    Args:
        flops: total of the chosen cells.
        most: cells at most; None leaves the number to the FLOPs.
        keep: candidates that must be among them.

    Raises:
        FitError: not one more cell fits into the total.
    """
    cost = criterion.cost
    fixed = list(keep)
    if float(cost[fixed].sum()) > flops * (1 + 1e-9) or (most is not None and len(fixed) > most):
        raise FitError(f"{flops:.3g} FLOPs do not pay for the cells that are asked for; give more")
    starts = [_greedy(criterion, flops, most, fixed, power) for power in GREEDY]
    found = [_exchange(criterion, rows, flops, most, len(fixed)) for rows in starts]
    best = min(found, key=criterion.value)
    if not best:
        raise FitError(f"no candidate fits into {flops:.3g} FLOPs (the cheapest takes {cost.min():.3g}); give more")
    ratio = float(np.exp((criterion.value(best) - criterion.value([])) / 2))
    return Design(tuple(sorted(best)), float(cost[best].sum()), ratio)


def _affordable(criterion: Criterion, rows: Sequence[int], flops: float, most: int | None) -> np.ndarray:
    """[m] bool: candidates not yet chosen that still fit."""
    left = flops * (1 + 1e-9) - float(criterion.cost[list(rows)].sum())
    free = criterion.cost <= left
    free[list(rows)] = False
    return free if most is None or len(rows) < most else np.zeros_like(free)


def _greedy(criterion: Criterion, flops: float, most: int | None, rows: list[int], power: float) -> list[int]:
    """Adds the largest gain / C^power until nothing fits."""
    rows = list(rows)
    scale = criterion.cost**power
    while (free := _affordable(criterion, rows, flops, most)).any():
        gain = (criterion.value(rows) - criterion.with_each(rows)) / scale
        rows.append(int(np.argmax(np.where(free, gain, -np.inf))))
    return rows


def _exchange(criterion: Criterion, rows: list[int], flops: float, most: int | None, fixed: int) -> list[int]:
    """Swaps single cells (the first `fixed` stay) while that helps; what a swap frees is spent again."""
    for _ in range(MAX_EXCHANGES):
        before = criterion.value(rows)
        for place in range(fixed, len(rows)):
            rest = rows[:place] + rows[place + 1 :]
            free = _affordable(criterion, rest, flops, most)
            free[rows[place]] = True
            to = int(np.argmin(np.where(free, criterion.with_each(rest), np.inf)))
            rows = [*rows[:place], to, *rows[place + 1 :]]
        rows = _greedy(criterion, flops, most, rows, GREEDY[1])
        if criterion.value(rows) > before - 1e-9:
            return rows
    return rows
