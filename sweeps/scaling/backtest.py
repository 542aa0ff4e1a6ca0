"""What forecasts would have been worth on a finished sweep: its larger budgets forecast from its smaller ones.

The runs up to each budget from the fourth on are fitted as `sweeps.fit` does; the preferred approach forecasts the best
run of every larger budget, and the intervals of its loss and of N* are held against what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.analysis import Analysis, analyse
from sweeps.scaling.bootstrap import Interval
from sweeps.scaling.decided import size_intervals
from sweeps.scaling.isoflop import NEAREST, Minimum, fit_isoflop
from sweeps.scaling.table import FitError, Run, RunTable

FITTED = 4  # budgets at least
SIZES = 4  # of a budget that is forecast, at least: the lowest of fewer is no minimum
FURTHEST = 30.0  # times the largest fitted budget


@dataclass(frozen=True)
class Trial:
    """One budget forecast from smaller ones.

    Attributes:
        from_budget: largest FLOPs fitted. budget: FLOPs forecast. approach: preferred then.
        loss, interval: forecast of the run with the lowest loss there, nats per token. measured: its loss.
        n_interval: of N* there, parameters. n_measured: vertex of that budget's own parabola; NaN where it has none.
    """

    from_budget: float
    budget: float
    approach: str
    loss: float
    interval: Interval
    measured: float
    n_interval: Interval
    n_measured: float

    @property
    def inside(self) -> bool | None:
        """Whether the loss lies in its interval; None without one."""
        return None if np.isnan(self.interval.low) else self.measured in self.interval

    @property
    def n_inside(self) -> bool | None:
        """Whether the vertex lies in N*'s interval; None where either is missing."""
        missing = np.isnan(self.n_interval.low) or np.isnan(self.n_measured)
        return None if missing else self.n_measured in self.n_interval


def backtest(table: RunTable, bootstrap: int = 400, seed: int = 0, near: int | None = NEAREST) -> Iterator[Trial]:
    """Every budget forecast from every shorter sweep that the table contains, as they are done.

    Args:
        bootstrap, seed, near: see `analysis.analyse`.

    Raises:
        FitError: too few budgets.
    """
    budgets = table.budgets
    if len(budgets) <= FITTED:
        raise FitError(f"{len(budgets)} budgets; forecasting one from {FITTED} smaller ones needs {FITTED + 1}")
    minima = _vertices(table, near)
    for last, largest in enumerate(budgets[FITTED - 1 : -1], FITTED):
        ahead = [float(c) for c in budgets[last:] if c <= FURTHEST * largest and len(_runs(table, c)) >= SIZES]
        if not ahead:
            continue
        analysis = analyse(table.up_to_budget(float(largest)), None, ahead, bootstrap, seed, near)
        if not analysis.results:
            continue
        for c in ahead:
            yield _trial(analysis, min(_runs(table, c), key=lambda run: run.loss), float(largest), c, minima)


def _trial(analysis: Analysis, run: Run, largest: float, c: float, minima: tuple[Minimum, ...]) -> Trial:
    best = analysis.best
    shape = run.n_params, run.d_tokens, run.c_flops
    vertex = next((m.n_opt for m in minima if m.ok and np.isclose(m.budget, c, rtol=1e-9)), float("nan"))
    n_interval, _ = size_intervals(analysis, best, c)
    return Trial(
        largest, c, best.approach, best.model.loss_at(*shape), best.forecast_interval(*shape), run.loss, n_interval,
        vertex,
    )  # fmt: skip


def _runs(table: RunTable, c: float) -> tuple[Run, ...]:
    return table.where(np.isclose(table.budget, c, rtol=1e-9)).runs


def _vertices(table: RunTable, near: int | None) -> tuple[Minimum, ...]:
    try:
        return fit_isoflop(table, near, "power").minima
    except FitError:
        return ()
