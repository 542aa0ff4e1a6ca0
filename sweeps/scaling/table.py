"""The run table: what every fit reads. One row is one finished training run.

Rows a fit cannot use are not dropped silently: they are listed in `RunTable.excluded`, each with its reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lm.errors import ConfigError

Array = NDArray[np.float64]

# Budgets are one when their ln differs by less than this from a neighbour's; without a budget column, those of C.
BUDGET_GAP = 0.05
# A run whose FLOPs are further than this from its budget is not a point of that budget's curve.
BUDGET_TOLERANCE = 0.10
# SQL stores of MLflow turn infinity into the largest double.
LARGEST_LOSS = 1e300
# No run has such numbers, and their squares and products leave the range of a double.
LARGEST, SMALLEST = 1e100, 1e-100
LOSSES = 1e-9, 1e9


class FitError(ConfigError):
    """The data cannot support the answer asked for; the message says why and what would help."""


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        run: a name that identifies the run; rows that share it are measurements of one run, not independent.
        n_params: N, parameters under the convention the table names.
        d_tokens: D, training tokens.
        c_flops: C, training FLOPs under the convention the table names.
        loss: nats per token.
        budget: FLOPs of the IsoFLOP curve the run belongs to; None when the design has no budgets.
        extra: further columns (seed, n_heads, ...), as they came; the ones below are in it too.
        lr: peak learning rate. batch_tokens: global batch, tokens.
        d_model, n_layers: width and depth. n_non_embedding: parameters of the blocks alone.
        unique_tokens: tokens of the training data that are not repeats; None when nothing is repeated or known.
        source: name of the training data.
    """

    run: str
    n_params: float
    d_tokens: float
    c_flops: float
    loss: float
    budget: float | None = None
    extra: dict[str, object] = field(default_factory=dict)
    lr: float | None = None
    batch_tokens: float | None = None
    d_model: float | None = None
    n_layers: float | None = None
    n_non_embedding: float | None = None
    unique_tokens: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class Excluded:
    """A row that no fit used, and why."""

    run: str
    reason: str


@dataclass(frozen=True)
class RunTable:
    """Valid runs, and those excluded with reasons.

    Attributes:
        runs: valid rows.
        excluded: rows left out and why, from reading and from validation.
        convention: name of the FLOP convention behind c_flops, for reports.
        n_convention: name of the parameter convention behind n_params, for reports.
    """

    runs: tuple[Run, ...]
    excluded: tuple[Excluded, ...] = ()
    convention: str = "as given"
    n_convention: str = "as given"

    @classmethod
    def from_runs(
        cls,
        runs: Iterable[Run],
        excluded: Sequence[Excluded] = (),
        convention: str = "as given",
        n_convention: str = "as given",
    ) -> RunTable:
        """Validates rows; a bad one moves to `excluded` with its reason. Budgets that differ by rounding become one."""
        good: list[Run] = []
        bad = list(excluded)
        for run in runs:
            reason = _why_unusable(run)
            if reason is None:
                good.append(run)
            else:
                bad.append(Excluded(run.run, reason))
        return cls(_join_budgets(good), tuple(bad), convention, n_convention)

    def why_empty(self) -> str:
        """Reasons why no run is left, one row of each kind, for a message."""
        kinds: dict[str, str] = {}
        for row in self.excluded:
            kinds.setdefault(re.sub(r"[\d.]+", "#", row.reason), f"{row.run}: {row.reason}")
        few = list(kinds.values())[:3]
        return f"all {len(self.excluded)} rows are excluded, such as {'; '.join(few)}" if few else "no rows were read"

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def n(self) -> Array:
        """[runs] fp64, N in parameters."""
        return np.array([r.n_params for r in self.runs], dtype=np.float64)

    @property
    def d(self) -> Array:
        """[runs] fp64, D in tokens."""
        return np.array([r.d_tokens for r in self.runs], dtype=np.float64)

    @property
    def c(self) -> Array:
        """[runs] fp64, C in FLOPs."""
        return np.array([r.c_flops for r in self.runs], dtype=np.float64)

    @property
    def loss(self) -> Array:
        """[runs] fp64, nats per token."""
        return np.array([r.loss for r in self.runs], dtype=np.float64)

    def optional(self, name: str) -> Array:
        """[runs] fp64 of an optional column (lr, batch_tokens, unique_tokens, ...); NaN where a run has none."""
        values = [getattr(run, name) for run in self.runs]
        return np.array([float("nan") if value is None else float(value) for value in values], dtype=np.float64)

    @property
    def clusters(self) -> NDArray[np.int64]:
        """[runs] int64, equal for rows of one run (one name and one N): the unit of every resampling."""
        number: dict[tuple[str, float], int] = {}
        return np.array([number.setdefault((r.run, r.n_params), len(number)) for r in self.runs], dtype=np.int64)

    @property
    def budget(self) -> Array:
        """[runs] fp64, FLOPs of each row's curve; grouped from C where the column is missing."""
        if all(r.budget is not None for r in self.runs):
            return np.array([r.budget for r in self.runs], dtype=np.float64)
        return _group_by_flops(self.c)

    @property
    def budgets(self) -> Array:
        """[budgets] fp64, distinct budgets, ascending."""
        return np.unique(self.budget)

    def in_order(self) -> RunTable:
        """By C, N, D and loss: resampling draws row by row, so that the order of a file must not matter."""
        return replace(self, runs=tuple(sorted(self.runs, key=lambda r: (r.c_flops, r.n_params, r.d_tokens, r.loss))))

    def where(self, keep: Sequence[bool] | NDArray[np.bool_], reason: str | None = None) -> RunTable:
        """The rows where `keep` holds; the others move to `excluded` when a reason is given, else they just go."""
        kept = tuple(run for run, use in zip(self.runs, keep, strict=True) if use)
        gone = tuple(Excluded(run.run, reason) for run, use in zip(self.runs, keep, strict=True) if reason and not use)
        return replace(self, runs=kept, excluded=self.excluded + gone)

    def up_to_budget(self, largest_flops: float) -> RunTable:
        """Rows of budgets at or below `largest_flops`."""
        return self.where(self.budget <= largest_flops * (1 + 1e-9))

    def near_minimum(self, max_excess: float) -> RunTable:
        """Rows whose loss is at most (1 + max_excess) times the lowest of their budget; the others are excluded.

        A surface fit is biased by cells far from the optimum, where its form holds least.
        """
        budget, loss = self.budget, self.loss
        lowest = {b: loss[budget == b].min() for b in np.unique(budget)}
        keep = np.array([y <= lowest[b] * (1 + max_excess) for b, y in zip(budget, loss, strict=True)], dtype=bool)
        return self.where(keep, f"loss more than {max_excess:.0%} above its budget's lowest")


def _why_unusable(run: Run) -> str | None:
    for name, value in (("N", run.n_params), ("D", run.d_tokens), ("C", run.c_flops)):
        if not (math.isfinite(value) and value > 0):
            return f"{name} is {value:g}, not a positive number"
        if not SMALLEST < value < LARGEST:
            return f"{name} is {value:g}, which no run has; is it the right column?"
    if math.isnan(run.loss):
        return "loss is NaN (diverged)"
    if not math.isfinite(run.loss) or abs(run.loss) >= LARGEST_LOSS:
        return "loss is infinite (diverged)"
    if run.loss <= 0:
        return f"loss is {run.loss:g}, not positive"
    if not LOSSES[0] < run.loss < LOSSES[1]:
        return f"loss is {run.loss:g} nats per token, which no run has; is it the right column?"
    if run.budget is None:
        return None
    if not (math.isfinite(run.budget) and run.budget > 0):
        return f"budget is {run.budget:g}, not a positive number"
    off = run.c_flops / run.budget - 1
    if abs(off) > BUDGET_TOLERANCE:
        return f"FLOPs are {off:+.0%} off the budget (at most {BUDGET_TOLERANCE:.0%})"
    return None


def _join_budgets(runs: list[Run]) -> tuple[Run, ...]:
    """Runs whose budgets belong together get the geometric mean of them; a budget of its own stays to the last bit."""
    given = np.array(sorted({run.budget for run in runs if run.budget is not None}), dtype=np.float64)
    joined = dict(zip(given.tolist(), _group_by_flops(given).tolist(), strict=True))
    return tuple(run if run.budget is None else replace(run, budget=joined[run.budget]) for run in runs)


def _group_by_flops(c_flops: Array) -> Array:
    """Single-link groups in ln C; each row gets its group's geometric mean."""
    group, budget = group_logs(c_flops), np.empty_like(c_flops)
    for g in np.unique(group):
        members = c_flops[group == g]
        same = members.min() == members.max()
        budget[group == g] = members[0] if same else math.exp(np.log(members).mean())
    return budget


def group_logs(values: Array, gap: float = BUDGET_GAP) -> NDArray[np.int64]:
    """[rows] int64: number of each row's single-link group in ln of positive values, ascending."""
    order = np.argsort(values)
    group = np.zeros(len(values), dtype=np.int64)
    if len(values):
        group[order] = np.concatenate([[0], np.cumsum(np.diff(np.log(values[order])) > gap)])
    return group
