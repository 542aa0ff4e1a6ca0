"""Next cells for approach 2: whole rows of cells, because a parabola needs them.

Approach 2 sees N* only through each budget's vertex, and ln N* at the target through a line: its variance is
sum_b h_b^2 s_b^2, with s_b the sd of the vertex at budget b and h_b the leverage of that budget on the target,
1/n + (ln C - mean)(ln C_b - mean) / S. A row is either the sizes of a budget once more with other seeds, which divides
s_b by the root of the runs a size, or a new budget, which also moves the leverages. s_b is simulated: noise on the
design, the parabola refitted. There are few rows to choose from, so every combination within the FLOPs is looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap_isoflop import estimate_noise
from sweeps.scaling.curves import LOG_N, vertices
from sweeps.scaling.design import Cells
from sweeps.scaling.isoflop import NEAREST, IsoFlopFit, Minimum, fit_isoflop
from sweeps.scaling.proposal import budget_step, join
from sweeps.scaling.table import Array, FitError, RunTable

MOST_REPEATS = 2
NEW_STEPS = (1.0, 1.5, 2.0)  # of the grid beyond its largest budget
DRAWS = 200


@dataclass(frozen=True)
class RowPlan:
    """Rows to run next.

    Attributes:
        repeats: FLOPs of a budget -> how often its sizes run once more, with new seeds.
        new_budget: FLOPs of a new row; 0 for none. seeds: runs of each of its sizes.
        cells: all cells, repeats listed as often as they run. flops: their sum.
        before, after: sd of ln N* at the target; expected.
    """

    repeats: dict[float, int]
    new_budget: float
    seeds: int
    cells: Cells
    flops: float
    before: float
    after: float


@dataclass(frozen=True)
class _Row:
    budget: float
    cells: Cells
    loss: Array


def propose_rows(
    table: RunTable, target_c: float, flops: float | None = None, near: int | None = NEAREST, seed: int = 0
) -> RowPlan:
    """The rows that make ln N* at the target best known by approach 2.

    Args:
        flops: total of the new cells; None takes 4 sizes at one new budget, a step of the grid on.

    Raises:
        FitError: approach 2 or its noise is refused, or no row fits into the FLOPs.
    """
    fit = fit_isoflop(table, near, "power")
    noise_sd = estimate_noise(table, fit).sd
    old = [_old_row(table, m) for m in fit.minima if m.ok]
    new = [row for step in NEW_STEPS if (row := _new_row(table, fit, step, near)).budget <= target_c]
    total = float(new[0].cells.c.sum()) if flops is None and new else flops
    if total is None:
        raise FitError(f"the target, {target_c:.3g} FLOPs, is within a step of the grid: give the FLOPs to spend")
    once = {row.budget: _vertex_sd(row, noise_sd, near, seed) for row in [*old, *new]}
    explained = float(np.mean([once[row.budget] ** 2 for row in old]))
    scatter = max(0.0, fit.n_line.variance - explained)
    before = _sd_at(target_c, [(row.budget, once[row.budget]) for row in old], scatter)
    best: tuple[float, tuple[int, ...], _Row | None, int] | None = None
    for counts, extra, seeds in _combinations(len(old), new):
        parts = _parts(old, counts, extra, seeds)
        if not parts or sum(float(part.c.sum()) for part in parts) > total * (1 + 1e-9):
            continue
        runs = [(row, 1 + count) for row, count in zip(old, counts, strict=True)] + ([(extra, seeds)] if extra else [])
        known = [(row.budget, once[row.budget] / float(np.sqrt(each))) for row, each in runs]
        value = _sd_at(target_c, known, scatter)
        if best is None or value < best[0]:
            best = value, counts, extra, seeds
    if best is None:
        raise FitError(f"no row of cells fits into {total:.3g} FLOPs; give more")
    after, counts, extra, seeds = best
    cells = join(_parts(old, counts, extra, seeds))
    repeats = {row.budget: count for row, count in zip(old, counts, strict=True) if count}
    return RowPlan(repeats, extra.budget if extra else 0.0, seeds, cells, float(cells.c.sum()), before, after)


def _combinations(rows: int, new: list[_Row]) -> Iterator[tuple[tuple[int, ...], _Row | None, int]]:
    """Every (repeats of each old row, new row or none, seeds of the new row)."""
    for counts in itertools.product(range(MOST_REPEATS + 1), repeat=rows):
        yield counts, None, 0
        for row in new:
            for seeds in (1, 2):
                yield counts, row, seeds


def _parts(old: list[_Row], counts: tuple[int, ...], extra: _Row | None, seeds: int) -> list[Cells]:
    parts = [row.cells for row, count in zip(old, counts, strict=True) for _ in range(count)]
    return parts + [extra.cells] * seeds if extra else parts


def _old_row(table: RunTable, minimum: Minimum) -> _Row:
    """The sizes a budget's parabola stands on, one run each, with the parabola's loss."""
    rows = np.array(minimum.rows)
    _, first = np.unique(np.round(np.log(table.n[rows]), 9), return_index=True)
    rows = rows[first]
    return _Row(minimum.budget, Cells(table.n[rows], table.d[rows], table.c[rows]), minimum.at(table.n[rows]))


def _new_row(table: RunTable, fit: IsoFlopFit, steps: float, near: int | None) -> _Row:
    """Sizes around N* at a new budget, as far apart as the old ones were, with the fitted loss."""
    budget = float(table.budgets[-1] * budget_step(table.budgets) ** steps)
    gaps = [np.diff(np.unique(np.round(np.log(table.n[list(m.rows)]), 9))) for m in fit.minima if m.ok]
    count = near or round(float(np.median([len(gap) + 1 for gap in gaps])))
    offsets = (np.arange(count) - (count - 1) / 2) * float(np.median(np.concatenate(gaps)))
    n = fit.n_opt(budget) * np.exp(offsets)
    product = float(np.exp(np.mean(np.log(table.c / (table.n * table.d)))))
    cells = Cells(n, budget / (product * n), np.full(count, budget))
    return _Row(budget, cells, np.asarray(fit.loss_opt(budget) * (1 + fit.curvature * offsets**2)))


def _vertex_sd(row: _Row, noise_sd: float, near: int | None, seed: int) -> float:
    """Sd of ln N* of one row's vertex under noise of ln loss; refused curves are left out."""
    draws = np.random.default_rng(seed).standard_normal((DRAWS, len(row.loss)))
    log_n, log_d = np.log(row.cells.n), np.log(row.cells.d)
    found = vertices(log_n, log_d, row.loss * np.exp(noise_sd * draws), near)[:, LOG_N]
    good = found[np.isfinite(found)]
    if len(good) < DRAWS / 2:
        raise FitError(
            f"{row.budget:.3g} FLOPs: noise hides the minimum of most simulated curves; add sizes further out"
        )
    return float(np.std(good))


def _sd_at(target_c: float, known: list[tuple[float, float]], scatter: float) -> float:
    """Sd of the line through the vertices at the target; known: (budget, sd of its vertex)."""
    x = np.log([budget for budget, _ in known])
    leverage = 1 / len(x) + (np.log(target_c) - x.mean()) * (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    variance = np.array([sd for _, sd in known]) ** 2 + scatter
    return float(np.sqrt(np.sum(leverage**2 * variance)))
