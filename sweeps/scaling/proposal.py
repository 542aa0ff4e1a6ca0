"""From a run table to the next cells: candidates around the fitted optimum, the best set of them, what it would gain.

Candidates are sizes around N*(C) at every budget there is and at one new, largest budget. Sizes go no further from N*
than the grid's own did: a surface is a good description near its optimum, and far cells bias it. One cell near N* at
the new budget is always among those chosen: the criterion believes the fitted form, and only a run beyond the grid can
show that the form does not hold. Forecast it before it runs; then it is a holdout, and afterwards a row like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import interval
from sweeps.scaling.bootstrap_parametric import ParametricReplicates, bootstrap_parametric
from sweeps.scaling.design import Cells, Criterion, choose
from sweeps.scaling.optimum import FlopRule, flop_rule, optimum
from sweeps.scaling.parametric import ParametricFit, fit_parametric
from sweeps.scaling.table import Array, FitError, RunTable

SIZES = 25  # candidates a budget
PER_BUDGET = 3  # cells a budget of a uniform extension, the yardstick for FLOPs and number of cells
DRAWS = 24  # replicates the criterion averages over
SPREAD = (np.log(1.5), np.log(4.0))  # bounds of how far from N* candidates may lie, in ln N
DEFAULT_STEP = 3.0

# Candidates at a budget, from (C, fitted N* there, spread in ln N): even in ln N, or real shapes.
SizeRule = Callable[[float, float, float], Cells]


@dataclass(frozen=True)
class Base:
    """Approach 3 on the runs there are: what a proposal stands on."""

    table: RunTable
    fit: ParametricFit
    rule: FlopRule
    replicates: ParametricReplicates

    def n_opt(self, c_flops: float) -> float:
        return float(optimum(self.fit.theta[None], self.rule, c_flops)[0][0])

    def half_width(self, target_c: float, decision: str) -> float:
        """Half of the 95% bootstrap interval of ln N* or ln L*; NaN when too few replicates hold."""
        values = self.replicates.decision(target_c)[0 if decision == "size" else 2]
        ends = interval(np.log(values))
        return (ends.high - ends.low) / 2


@dataclass(frozen=True)
class Proposal:
    """Cells to run next.

    Attributes:
        cells: the choice, by FLOPs and then N. flops: their sum. target_c: FLOPs of the decision.
        decision: `size` (ln N*) or `loss` (ln L*).
        before: half-width of the decision's 95% interval now, in logs; after: expected with the cells.
        holdout: index of the cell that tests the form beyond the grid; None when the FLOPs do not reach so far.
        notes: what to know, in words.
    """

    cells: Cells
    flops: float
    target_c: float
    decision: str
    before: float
    after: float
    holdout: int | None
    notes: tuple[str, ...] = ()


def base_of(table: RunTable, bootstrap: int = 200, seed: int = 0, starts: int = 48) -> Base:
    """Fits approach 3 and its replicates.

    Raises:
        FitError: as `fit_parametric`.
    """
    fit, rule = fit_parametric(table, starts, seed), flop_rule(table)
    return Base(table, fit, rule, bootstrap_parametric(table, fit, rule, bootstrap, seed, "noise"))


def budget_step(budgets: Array) -> float:
    """Ratio of neighbouring budgets, geometric mean; 3 for a single one."""
    if len(budgets) < 2:
        return DEFAULT_STEP
    return float((budgets[-1] / budgets[0]) ** (1 / (len(budgets) - 1)))


def spread_of(base: Base) -> float:
    """How far from N* the grid's budgets reach, in ln N: median over budgets, between ln 1.5 and ln 4."""
    table = base.table
    reach = []
    for budget in table.budgets:
        distance = np.log(table.n[np.isclose(table.budget, budget, rtol=1e-9)]) - np.log(base.n_opt(float(budget)))
        reach.append(np.abs(distance).max())
    finite = [r for r in reach if np.isfinite(r)]
    return float(np.clip(np.median(finite), *SPREAD)) if finite else SPREAD[0]


def sizes_at(base: Base, c_flops: float, spread: float, count: int = SIZES) -> Cells:
    """`count` sizes evenly in ln N within `spread` of N*(C), with the tokens that spend C."""
    n = base.n_opt(c_flops) * np.exp(np.linspace(-spread, spread, count))
    return Cells(n, base.rule.tokens(n, c_flops), np.full(count, float(c_flops)))


def join(parts: list[Cells]) -> Cells:
    """One list of cells."""
    return Cells(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("n", "d", "c")))


def uniform_extension(base: Base, largest: float, per_budget: int = PER_BUDGET) -> Cells:
    """The plain way on: as many new cells at every budget and at a new largest one, spread evenly around N*."""
    spread = spread_of(base)
    return join([sizes_at(base, float(c), spread, per_budget) for c in [*base.table.budgets, largest]])


def propose(
    base: Base,
    target_c: float,
    flops: float | None = None,
    most: int | None = None,
    largest: float | None = None,
    decision: str = "size",
    sizes: SizeRule | None = None,
) -> Proposal:
    """Chooses the next cells.

    Args:
        base: the fit of the runs there are. target_c: FLOPs of the decision.
        flops: total of the new cells; None takes what `uniform_extension` costs.
        most: cells at most; None takes as many as `uniform_extension` has.
        largest: FLOPs of the new largest budget; None goes one step of the grid on.
        decision: `size` or `loss`.
        sizes: candidates at a budget from (C, N*, spread in ln N); None spreads them evenly in ln N.

    Raises:
        FitError: no optimum inside, or FLOPs that pay for no cell.
        ValueError: a new largest budget that is not above the grid or not below the target.
    """
    budgets = base.table.budgets
    new = float(budgets[-1] * budget_step(budgets)) if largest is None else largest
    if not budgets[-1] < new:
        raise ValueError(f"the new largest budget must be above {budgets[-1]:.3g} FLOPs, got {new:.3g}")
    if largest is not None and not largest <= target_c:
        raise ValueError(f"the new largest budget must not be above the target, {target_c:.3g} FLOPs; got {new:.3g}")
    new = min(new, max(target_c, float(budgets[-1])))
    if not all(np.isfinite(base.n_opt(c)) for c in (float(budgets[0]), target_c)):
        raise FitError("the fitted surface has no optimum inside; add runs that differ more in N and D")
    plain = PER_BUDGET * (float(budgets.sum()) + new)
    flops, most = plain if flops is None else flops, PER_BUDGET * (len(budgets) + 1) if most is None else most
    notes: list[str] = []
    parts = _candidates(base, [float(c) for c in budgets], sizes)
    keep: list[int] = []
    if budgets[-1] < new <= flops:
        beyond = _candidates(base, [new], sizes)
        if beyond:
            nearest = int(np.argmin(np.abs(np.log(beyond[0].n / base.n_opt(new)))))
            keep = [sum(len(part) for part in parts) + nearest]
            parts += beyond
    if not keep:
        notes.append(f"no cell beyond the grid fits ({new:.3g} FLOPs): nothing will test whether the form holds there")
    if not parts:
        raise FitError("no candidate cells: every size near the optimum is in the sweep already or breaks its rules")
    return _chosen(base, join(parts), target_c, flops, most, keep, decision, notes)


def _candidates(base: Base, budgets: list[float], sizes: SizeRule | None) -> list[Cells]:
    spread = spread_of(base)
    rule = sizes or (lambda c, _, width: sizes_at(base, c, width))
    found = [rule(c, base.n_opt(c), spread) for c in budgets]
    return [cells for cells in found if len(cells)]


def _chosen(
    base: Base, pool: Cells, target_c: float, flops: float, most: int, keep: list[int], decision: str, notes: list[str]
) -> Proposal:
    table = base.table
    theta = base.replicates.theta
    theta = theta[np.isfinite(theta).all(axis=1) & (theta[:, 3] > 0) & (theta[:, 4] > 0)][:DRAWS]
    sd = float(np.median(base.replicates.noise_sd))
    runs = Cells(table.n, table.d, table.c)
    criterion = Criterion(theta, base.rule, target_c, runs, pool, sd, decision)
    design = choose(criterion, flops, most, keep)
    order = sorted(design.rows, key=lambda i: (pool.c[i], pool.n[i]))
    before = base.half_width(target_c, decision)
    holdout = order.index(keep[0]) if keep else None
    return Proposal(
        pool.take(order), design.flops, target_c, decision, before, before * design.ratio, holdout, tuple(notes)
    )
