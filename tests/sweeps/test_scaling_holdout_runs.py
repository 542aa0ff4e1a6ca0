"""Tables without budgets: the form is chosen by predicting the runs of most compute."""

from __future__ import annotations

import numpy as np
import pytest

from sweeps.scaling.analysis import analyse
from sweeps.scaling.holdout_runs import rolling_runs
from sweeps.scaling.table import Run, RunTable


def table(count: int, noise: float) -> RunTable:
    """Runs scattered over N and D, on Hoffmann's surface."""
    rng = np.random.default_rng(3)
    n, d = np.exp(rng.uniform(np.log([1e7, 1e8]), np.log([1e9, 1e11]), (count, 2))).T
    loss = (1.69 + 406.4 / n**0.34 + 410.7 / d**0.28) * np.exp(noise * rng.standard_normal(count))
    rows = zip(n, d, loss, strict=True)
    return RunTable.from_runs([Run(f"r{i}", n, d, 6 * n * d, y) for i, (n, d, y) in enumerate(rows)])


class Off:
    """Predicts every loss a known share too high, and less so the more runs it has seen."""

    def __init__(self, seen: RunTable):
        self.seen = len(seen)

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> float:
        return (1.69 + 406.4 / n_params**0.34 + 410.7 / d_tokens**0.28) * (1 + 1 / self.seen)


def test_each_part_is_predicted_from_the_runs_below_it() -> None:
    found = rolling_runs(table(200, 0.0), Off)
    assert [point.error for point in found.points] == pytest.approx([1 / 140, 1 / 160, 1 / 180])
    assert all(point.from_budget < point.budget and point.distance > 0 for point in found.points)
    assert found.reason == ""
    few = rolling_runs(table(19, 0.0), Off)
    assert few.points == () and "19 runs" in few.reason


def test_the_true_form_is_preferred() -> None:
    """Kaplan's form fits the small runs as well, and loses on those it has not seen."""
    analysis = analyse(table(200, 0.002), ["kaplan", "parametric"], bootstrap=0)
    errors = {name: result.holdout.relative_error for name, result in analysis.results.items()}
    assert analysis.best.approach == "parametric" and errors["parametric"] < 0.002 < 0.005 < errors["kaplan"]
    assert "parametric is preferred" in analysis.verdict
