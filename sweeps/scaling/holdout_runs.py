"""Holdout for tables that are no IsoFLOP grid: fit the runs of less compute, predict those of more.

Without budgets there are no minima to compare, but every form can say what a run of N and D loses. The runs are cut by
compute at 70, 80 and 90%; each part is predicted from all runs below it, and its error is the mean over its runs, so
that the noise of single runs hardly counts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import numpy as np

from sweeps.scaling.holdout import Holdout, HoldoutPoint, distance
from sweeps.scaling.table import FitError, RunTable

SHARES = (0.7, 0.8, 0.9, 1.0)
MIN_RUNS = 20


class RunPredictor(Protocol):
    """What a fit must answer: the loss of a run, nats per token."""

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> float: ...


def rolling_runs(table: RunTable, fit: Callable[[RunTable], RunPredictor]) -> Holdout:
    """Mean relative error of each part of the runs, predicted from those of less compute.

    Args:
        fit: refits a table; may raise FitError.
    """
    if len(table) < MIN_RUNS:
        return Holdout((), f"{len(table)} runs, holding some out by compute needs {MIN_RUNS}")
    edges = np.quantile(table.c, SHARES)
    points, reasons = [], []
    for low, high in pairwise(edges):
        try:
            points.append(_predict(table, fit, float(low), float(high)))
        except FitError as error:
            reasons.append(f"runs from {low:.3g} FLOPs: {error}")
    return Holdout(tuple(points), "; ".join(reasons))


def _predict(table: RunTable, fit: Callable[[RunTable], RunPredictor], low: float, high: float) -> HoldoutPoint:
    c = table.c
    seen, held = table.where(c <= low), table.where((c > low) & (c <= high))
    if not len(held):
        raise FitError("no run lies there")
    model = fit(seen)
    predicted = np.array([model.loss_at(r.n_params, r.d_tokens, r.c_flops) for r in held.runs])
    if not np.isfinite(predicted).all():
        raise FitError("the fit of the smaller runs does not reach there")
    centre = float(np.exp(np.log(held.c).mean()))
    error = float(np.mean(predicted / held.loss - 1))
    return HoldoutPoint(
        budget=centre,
        from_budget=float(seen.c.max()),
        predicted=float(predicted.mean()),
        measured=float(held.loss.mean()),
        error=error,
        distance=distance(seen.c, centre),
        n_ratio=float("nan"),
    )
