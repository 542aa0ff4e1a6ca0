"""Leave-last-budget-out error: how far a fit misses a budget it has not seen.

Bootstrap intervals speak of noise only. Whether the fitted form holds beyond the grid is a different question, and the
grid itself has an answer: fit without the largest budget, predict its minimum, compare. `rolling` does it for each
budget that two or more smaller ones can predict; the forecast's interval takes the larger of the last error and their
root mean square. `python -m sweeps.backtest` measures what that is worth on finished sweeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sweeps.scaling.isoflop import Minimum
from sweeps.scaling.table import Array, FitError, RunTable

MAX_ROLLING = 3
MIN_BUDGETS = 2
# One to three errors say little about their own size. Set on published grids, see docs/scaling.md.
HOLDOUT_FACTOR = 2.0


class Predictor(Protocol):
    """What a fit must answer: N* in parameters, loss at the optimum in nats per token."""

    def n_opt(self, c_flops: float) -> float: ...

    def loss_opt(self, c_flops: float) -> float: ...


@dataclass(frozen=True)
class HoldoutPoint:
    """One budget predicted from the smaller ones.

    Attributes:
        budget: FLOPs held out. from_budget: largest FLOPs fitted.
        predicted, measured: loss at the minimum, nats per token; measured is the budget's own vertex, or its
            lowest loss where its curve is refused.
        error: predicted / measured - 1.
        distance: from the fitted budgets, see `distance`.
        n_ratio: predicted N* over the vertex; NaN where the curve is refused.
    """

    budget: float
    from_budget: float
    predicted: float
    measured: float
    error: float
    distance: float
    n_ratio: float


@dataclass(frozen=True)
class Holdout:
    """Errors of predicting unseen budgets, the last (largest) budget last.

    Attributes:
        points: ascending in budget; empty when there are too few budgets.
        reason: why points are missing, empty when none is.
    """

    points: tuple[HoldoutPoint, ...]
    reason: str = ""

    @property
    def last(self) -> HoldoutPoint | None:
        """The leave-last-budget-out point; None when it could not be made."""
        return self.points[-1] if self.points else None

    @property
    def relative_error(self) -> float:
        """Size to expect one budget ahead: the larger of |last| and the root mean square; NaN without points."""
        if not self.points:
            return float("nan")
        errors = np.array([p.error for p in self.points])
        return float(max(abs(errors[-1]), np.sqrt(np.mean(errors**2))))

    def error_at(self, c_flops: float, budgets: Array) -> float:
        """Relative error to expect at a target, from fits of all `budgets` [budgets] FLOPs; NaN without points.

        Each held-out error is divided by its distance and multiplied by the target's. Inside the grid that is the
        distance of the last held-out budget, so the error is not scaled down.
        """
        if not self.points:
            return float("nan")
        errors = np.array([p.error / p.distance for p in self.points])
        size = float(max(abs(errors[-1]), np.sqrt(np.mean(errors**2))))
        return size * max(distance(budgets, c_flops), self.points[-1].distance)

    def widening(self, c_flops: float, budgets: Array) -> float:
        """Half-width, relative to the loss, that held-out errors add to an interval at a target; NaN without points."""
        return HOLDOUT_FACTOR * self.error_at(c_flops, budgets)


def distance(budgets: Array, c_flops: float) -> float:
    """|ln C - mean ln C of the fitted budgets|: a line in logs that is off in its slope misses in proportion to it."""
    return float(abs(np.log(c_flops) - np.log(budgets).mean()))


def rolling(table: RunTable, minima: tuple[Minimum, ...], fit: Callable[[RunTable], Predictor]) -> Holdout:
    """Predicts the last three budgets (as far as there are two below), each from the smaller ones alone.

    Args:
        minima: the full table's IsoFLOP curves, the measured side of the comparison.
        fit: refits a table; may raise FitError.
    """
    budgets = table.budgets
    points, reasons = [], []
    for i in range(max(MIN_BUDGETS, len(budgets) - MAX_ROLLING), len(budgets)):
        try:
            points.append(_predict(table, minima, fit, float(budgets[i - 1]), float(budgets[i])))
        except FitError as error:
            reasons.append(f"{budgets[i]:.3g} FLOPs: {error}")
    if len(budgets) <= MIN_BUDGETS:
        reasons.append(f"{len(budgets)} budgets, holding one out needs {MIN_BUDGETS + 1}")
    return Holdout(tuple(points), "; ".join(reasons))


def _predict(
    table: RunTable,
    minima: tuple[Minimum, ...],
    fit: Callable[[RunTable], Predictor],
    from_budget: float,
    budget: float,
) -> HoldoutPoint:
    smaller = table.up_to_budget(from_budget)
    fitted, fitted_budgets = fit(smaller), smaller.budgets
    predicted = fitted.loss_opt(budget)
    if not np.isfinite(predicted):
        raise FitError("the fit of the smaller budgets has no interior optimum")
    curve = next((m for m in minima if m.ok and np.isclose(m.budget, budget, rtol=1e-9)), None)
    if curve is None:
        measured, n_ratio = float(table.loss[np.isclose(table.budget, budget, rtol=1e-9)].min()), float("nan")
    else:
        measured, n_ratio = curve.loss, fitted.n_opt(budget) / curve.n_opt
    return HoldoutPoint(
        budget, from_budget, predicted, measured, predicted / measured - 1, distance(fitted_budgets, budget), n_ratio
    )
