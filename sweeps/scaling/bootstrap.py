"""Bootstrap intervals on exponents and on the decision: N*, D* and loss at a target budget.

Two schemes; `auto` picks by the size of the grid and the result names the one used:

`rows`  Resamples runs with replacement inside each budget (all rows of a run together). Used when every budget has 8
        runs or more, or the table has no budgets (points scattered over N and D).
`noise` For small grids, where a resampled budget would often hold fewer than 3 sizes. The design stays; the losses
        are redrawn. Approach 2: fitted loss (points outside the parabola keep their own) times exp(noise), one draw a
        run. The noise sd is of ln loss, from repeated seeds if there are any, else pooled over the parabolas'
        residuals; each replicate draws the sd itself from its sampling distribution (sd^2 dof / chi2), so few
        degrees of freedom give wide intervals. Scatter of ln N*, ln D* and ln loss around their lines beyond what
        this noise explains (ragged shapes, batch rounding, curvature) is added to the minima as a random effect.
        Approach 3: fitted loss times exp(noise), sd from the surface's residuals (n - 5 degrees of freedom), drawn
        in the same way. Resampling the residuals' signs instead covered N* in only 70% of simulated sweeps: the
        Huber loss is nearly absolute, so several residuals are close to 0 by construction.

Intervals are percentiles. Replicates whose fit is refused are counted and reported, not hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.table import Array, RunTable

LEVEL = 0.95
ROWS_PER_BUDGET = 8
MAX_FAILED_SHARE = 0.2


@dataclass(frozen=True)
class Interval:
    """Percentile interval; NaN ends when too few replicates hold."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval(values: Array, level: float = LEVEL) -> Interval:
    """Percentile interval of the finite values; NaN when more than a fifth of them are not finite."""
    finite = values[np.isfinite(values)]
    if len(values) == 0 or len(finite) < (1 - MAX_FAILED_SHARE) * len(values):
        return Interval(float("nan"), float("nan"))
    tail = 50 * (1 - level)
    low, high = np.percentile(finite, [tail, 100 - tail])
    return Interval(float(low), float(high))


def known_scheme(scheme: str, known: tuple[str, ...]) -> None:
    """Raises ValueError for a scheme that is not among those known."""
    if scheme not in known:
        raise ValueError(f"unknown bootstrap scheme {scheme!r}; choose {', '.join(known[1:])} or {known[0]}")


def choose_scheme(table: RunTable, scheme: str = "auto") -> str:
    """`rows` for grids with 8 runs or more in every budget and for tables without budgets, else `noise`."""
    if scheme in ("rows", "noise"):
        return scheme
    known_scheme(scheme, ("auto", "rows", "noise"))
    if any(run.budget is None for run in table.runs):
        return "rows" if len(table) >= 5 * ROWS_PER_BUDGET else "noise"
    clusters, budget = table.clusters, table.budget
    fewest = min(len(np.unique(clusters[budget == b])) for b in table.budgets)
    return "rows" if fewest >= ROWS_PER_BUDGET else "noise"


def draw_counts(table: RunTable, k: int, generator: np.random.Generator) -> Array:
    """[k, runs] fp64: how often each row is drawn; runs drawn whole, with replacement, inside each budget.

    A run with rows in several budgets is one unit of the whole table, so it is drawn once for all of them.
    """
    clusters = table.clusters
    count = int(clusters.max()) + 1
    budgeted = all(run.budget is not None for run in table.runs)
    budget = table.budget if budgeted else np.zeros(len(table))
    stratum = np.full(count, -1.0)
    for cluster, b in zip(clusters, budget, strict=True):
        stratum[cluster] = b if stratum[cluster] in (-1.0, b) else np.inf
    drawn = np.zeros((k, count))
    for s in np.unique(stratum):
        members = np.flatnonzero(stratum == s)
        picks = generator.integers(0, len(members), (k, len(members)))
        for row, pick in zip(drawn, picks, strict=True):
            row[members] += np.bincount(pick, minlength=len(members))
    return drawn[:, clusters]
