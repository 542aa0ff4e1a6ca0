"""Bootstrap intervals on exponents and on the decision: N*, D* and loss at a target budget.

Schemes; `auto` picks and the result names the one used:

`surface`  Approaches 1 and 2: simulated on surfaces drawn around approach 3's fit of the same runs, see `world`. The sd
        of ln loss is from repeated seeds if there are any, else from the surface's residuals; each replicate draws it
        from its sampling distribution (sd^2 dof / chi2), so few degrees of freedom give wide intervals.
`rows`  Resamples runs with replacement inside each budget (all rows of a run together). Surfaces, when every budget has
        8 runs or more or the table has no budgets (points scattered over N and D), and training curves.
`noise` The design stays; losses are redrawn around the fit, one draw a run. Surfaces on smaller grids (sd from the
        residuals, n - 5 degrees of freedom, drawn as above), and approach 2 where no surface can be fitted. Resampling
        the residuals' signs instead makes intervals too narrow: the Huber loss is nearly absolute, so several residuals
        are close to 0 by construction.

Intervals are percentiles. Replicates whose fit is refused are counted and reported, not hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.table import Array, RunTable

LEVEL = 0.95
ROWS_PER_BUDGET = 8
MAX_FAILED_SHARE = 0.2
BATCH_VALUES = 60_000  # problems x rows of one batch of refits: its dozen temporaries stay in the cache


@dataclass(frozen=True)
class Interval:
    """Percentile interval; NaN ends when too few replicates hold."""

    low: float
    high: float

    def hull(self, other: Interval) -> Interval:
        """The shortest interval over both; this one where either has no ends."""
        if not (self.low <= self.high and other.low <= other.high):
            return self
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


NO_INTERVAL = Interval(float("nan"), float("nan"))


def interval(values: Array, level: float = LEVEL) -> Interval:
    """Percentile interval of the finite values; NaN when more than a fifth of them are not finite."""
    finite = values[np.isfinite(values)]
    if len(values) == 0 or len(finite) < (1 - MAX_FAILED_SHARE) * len(values):
        return NO_INTERVAL
    tail = 50 * (1 - level)
    low, high = np.percentile(finite, [tail, 100 - tail])
    return Interval(float(low), float(high))


def widen(drawn: Interval, centre: float, amount: float) -> Interval:
    """Adds `amount` in quadrature to both half-widths around `centre`."""
    low = np.hypot(max(centre - drawn.low, 0.0), amount)
    high = np.hypot(max(drawn.high - centre, 0.0), amount)
    return Interval(centre - float(low), centre + float(high))


@dataclass(frozen=True)
class Noise:
    """sd of ln loss between equal runs, its degrees of freedom, and where it comes from."""

    sd: float
    dof: int
    source: str


def given_noise(noise_sd: float | None) -> Noise | None:
    """A known sd, with as good as infinite degrees of freedom."""
    return None if noise_sd is None else Noise(noise_sd, 10**6, "given")


def residual_noise(residuals: Array, constants: int, source: str = "residuals") -> Noise:
    """Noise from a fit's residuals of ln loss, [runs], with that many constants fitted."""
    dof = max(len(residuals) - constants, 1)
    return Noise(float(np.sqrt(np.sum(residuals**2) / dof)), dof, source)


def draw_sd(noise: Noise, k: int, generator: np.random.Generator) -> Array:
    """[k] fp64 from the sampling distribution of the sd: few degrees of freedom give wide intervals."""
    return noise.sd * np.sqrt(noise.dof / generator.chisquare(noise.dof, k))


def draw_noise(table: RunTable, k: int, generator: np.random.Generator) -> Array:
    """[k, rows] fp64 standard normal, one draw a run, shared by its rows."""
    clusters = table.clusters
    return generator.standard_normal((k, int(clusters.max()) + 1))[:, clusters]


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
