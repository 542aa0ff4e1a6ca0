"""Does following `sweeps.next` beat a uniform grid? Simulated sweeps of known surfaces, extended in several ways.

Each simulated sweep starts from one grid with noise: 4 budgets, 5 sizes each, not quite centred. It is then extended by

`uniform`  3 sizes at every budget and at a new largest one;
`next`     what `proposal.propose` chooses, with no more FLOPs and no more cells than `uniform`;
`row`      a new largest budget only, as many sizes as the same FLOPs pay for;
`dense`    the old budgets only, as many sizes each as the same FLOPs pay for.

Every arm knows only its own noisy runs; the approach-3 fit and its bootstrap are those of `sweeps.fit`. The method was
made on other surfaces: the constants of Besiroglu et al. 2024, and alpha/beta = 1.3; what was set after a look at these
is said in docs/forecasts.md.
`bent` is not of the fitted form: the design believes a form that does not hold, as it would on real runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import interval
from sweeps.scaling.design import Cells
from sweeps.scaling.proposal import (
    Base,
    base_of,
    budget_step,
    join,
    propose,
    sizes_at,
    spread_of,
    uniform_extension,
)
from sweeps.scaling.surfaces import SURFACES, KnownSurface
from sweeps.scaling.table import Array, FitError, Run, RunTable

ARMS = ("start", "uniform", "next", "row", "dense")
BUDGETS = tuple(float(c) for c in np.geomspace(1e18, 3e19, 4))
SIZES = 5
SPREAD = np.log(3.0)
OFF_CENTRE = 0.3  # sd of the error of the grid's centre, in ln N
STARTS = 8


@dataclass(frozen=True)
class Arm:
    """One way on, over all simulated sweeps: [sweeps] fp64 each.

    Attributes:
        error: ln N* fitted - ln N* true, at the target.
        width: of the 95% interval of ln N*; NaN where too few replicates held.
        covered: 1 where the interval held the truth. flops, cells: spent on the extension.
        expected: predicted over present half-width; NaN but for `next`.
    """

    error: Array
    width: Array
    covered: Array
    flops: Array
    cells: Array
    expected: Array


@dataclass(frozen=True)
class Truth:
    """A known surface, and the sd of ln loss of one run."""

    surface: KnownSurface
    noise_sd: float

    def log_n_opt(self, c_flops: float) -> float:
        """ln N*."""
        return float(np.log(self.surface.n_opt(c_flops)))

    def measure(self, cells: Cells, generator: np.random.Generator, name: str) -> list[Run]:
        """One noisy run a cell."""
        loss = self.surface.loss(cells.n, cells.d) * np.exp(self.noise_sd * generator.standard_normal(len(cells)))
        rows = enumerate(zip(cells.n, cells.d, cells.c, loss, strict=True))
        return [Run(f"{name}{i}", float(n), float(d), float(c), float(y), float(c)) for i, (n, d, c, y) in rows]


def simulate(
    surface: str,
    sweeps: int,
    reach: float = 100.0,
    noise_sd: float = 0.003,
    bootstrap: int = 100,
    seed: int = 0,
    arms: tuple[str, ...] = ARMS,
) -> dict[str, Arm]:
    """Extends `sweeps` simulated sweeps in every way.

    Args:
        surface: a name of SURFACES. reach: target over the largest swept budget.
        noise_sd: sd of ln loss of one run.

    Returns:
        Arms by name; a sweep whose fit was refused is NaN in that arm.

    Raises:
        ValueError: unknown surface.
    """
    if surface not in SURFACES:
        raise ValueError(f"unknown surface {surface!r}; choose from {', '.join(SURFACES)}")
    truth = Truth(SURFACES[surface], noise_sd)
    rows = [_one(truth, reach * BUDGETS[-1], bootstrap, [seed, number], arms) for number in range(sweeps)]
    return {name: Arm(*np.array([row[name] for row in rows]).T) for name in arms}


_NOTHING = (float("nan"),) * 6
_Row = tuple[float, ...]


def _one(truth: Truth, target: float, bootstrap: int, seed: list[int], arms: tuple[str, ...]) -> dict[str, _Row]:
    generator = np.random.default_rng(seed)
    runs = truth.measure(_start(truth, generator), generator, "start-")
    out: dict[str, _Row] = dict.fromkeys(arms, _NOTHING)
    try:
        base = base_of(RunTable.from_runs(runs), bootstrap, seed[1], STARTS)
        ways = _extensions(base, target)
    except FitError:
        return out
    for number, name in enumerate(arms):
        cells, expected = ways[name]
        more = truth.measure(cells, np.random.default_rng([*seed, number]), f"{name}-")
        try:
            after = base_of(RunTable.from_runs([*runs, *more]), bootstrap, seed[1], STARTS) if more else base
            out[name] = (*_score(truth, after, target), float(cells.c.sum()), float(len(cells)), expected)
        except FitError:
            continue
    return out


def _start(truth: Truth, generator: np.random.Generator) -> Cells:
    parts = []
    for c in BUDGETS:
        centre = truth.log_n_opt(c) + OFF_CENTRE * generator.standard_normal()
        n = np.exp(centre + np.linspace(-SPREAD, SPREAD, SIZES))
        parts.append(Cells(n, c / (6 * n), np.full(SIZES, c)))
    return join(parts)


def _extensions(base: Base, target: float) -> dict[str, tuple[Cells, float]]:
    """Cells of every way on, and what `next` expects of its own."""
    budgets = base.table.budgets
    largest = float(budgets[-1] * budget_step(budgets))
    plain = uniform_extension(base, largest)
    flops = float(plain.c.sum())
    spread, nan = spread_of(base), float("nan")
    chosen = propose(base, target, flops, len(plain), largest)
    row = sizes_at(base, largest, spread, int(flops / largest + 1e-9))
    dense = join([sizes_at(base, float(c), spread, int(flops / budgets.sum() + 1e-9)) for c in budgets])
    ways = {"start": plain.take([]), "uniform": plain, "row": row, "dense": dense}
    return {name: (cells, nan) for name, cells in ways.items()} | {"next": (chosen.cells, chosen.after / chosen.before)}


def _score(truth: Truth, base: Base, target: float) -> _Row:
    """Error of ln N*, width of its interval, 1 where the interval held the truth."""
    values, true = np.log(base.replicates.decision(target)[0]), truth.log_n_opt(target)
    ends = interval(values)
    covered = float(true in ends) if np.isfinite(ends.low) else float("nan")
    return float(np.log(base.n_opt(target))) - true, ends.high - ends.low, covered


@dataclass(frozen=True)
class Comparison:
    """One arm over another, paired by sweep: ratio and its 95% interval, of interval widths and of errors (RMSE)."""

    width: float
    width_low: float
    width_high: float
    rmse: float
    rmse_low: float
    rmse_high: float
    sweeps: int


def compare(first: Arm, second: Arm, seed: int = 0, draws: int = 2000) -> Comparison:
    """Ratios of `first` to `second` over the sweeps both answered; intervals by resampling sweeps.

    The width's ratio is the geometric mean of the sweeps' ratios, the error's the ratio of root mean squares.
    """
    both = np.isfinite(first.width) & np.isfinite(second.width) & np.isfinite(first.error) & np.isfinite(second.error)
    log_width = np.log(first.width[both] / second.width[both])
    squares = np.stack([first.error[both] ** 2, second.error[both] ** 2])
    count = int(both.sum())
    if count < 2:
        raise FitError(f"{count} sweeps have an interval in both arms; simulate more")
    picks = np.random.default_rng(seed).integers(0, count, (draws, count))
    widths = np.exp(log_width[picks].mean(axis=1))
    errors = np.sqrt(squares[0][picks].mean(axis=1) / squares[1][picks].mean(axis=1))
    ends = [*np.percentile(widths, [2.5, 97.5]), *np.percentile(errors, [2.5, 97.5])]
    rmse = float(np.sqrt(squares[0].mean() / squares[1].mean()))
    return Comparison(
        float(np.exp(log_width.mean())), float(ends[0]), float(ends[1]), rmse, float(ends[2]), float(ends[3]), count
    )
