"""Approach 1: training curves, one loss a run, refusals, intervals clustered by run."""

from __future__ import annotations

import numpy as np
import pytest

from sweeps.scaling.envelope import bootstrap_envelope, fit_envelope, has_curves
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, hoffmann_optimum, surface

LAW = surface(*HOFFMANN)
SIZES = np.geomspace(2e7, 6e9, 24)


def curves(noise: float = 0.0, seed: int = 0) -> RunTable:
    """24 sizes with 40 points of a training curve each; one draw of noise a run."""
    generator = np.random.default_rng(seed)
    runs = []
    for n in SIZES:
        factor = float(np.exp(noise * generator.standard_normal()))
        for c in np.geomspace(1e18, 1e21, 40):
            d = c / 6 / n
            runs.append(Run(f"{n:.4g}", float(n), float(d), float(c), LAW(n, d) * factor))
    return RunTable.from_runs(runs)


def test_envelope_of_training_curves_recovers_the_exponent() -> None:
    table = curves()
    fit = fit_envelope(table)
    assert fit.curves and fit.flags == ()
    assert fit.a == pytest.approx(0.28 / 0.62, abs=0.02)
    assert fit.b == pytest.approx(0.34 / 0.62, abs=0.02)
    assert fit.n_opt(1e20) == pytest.approx(hoffmann_optimum(1e20), rel=0.1)
    best = hoffmann_optimum(1e20)
    assert fit.loss_opt(1e20) == pytest.approx(LAW(best, 1e20 / 6 / best), rel=2e-3)


def test_curves_are_resampled_by_run() -> None:
    table = curves(0.001)
    fit = fit_envelope(table)
    draws = bootstrap_envelope(table, fit, 100)
    assert draws.scheme == "rows" and draws.world is None
    low, high = np.nanpercentile(draws.a, [2.5, 97.5])
    assert low < 0.28 / 0.62 < high
    assert 0 < high - low < 0.3
    assert np.array_equal(draws.a, bootstrap_envelope(table, fit, 100).a, equal_nan=True)


def test_one_loss_a_run_gives_one_point_a_budget_and_says_so() -> None:
    table = grid(LAW, sizes=9, noise=0.001)
    fit = fit_envelope(table)
    assert not has_curves(table) and len(fit.minima) == 5
    assert fit.flags == ("one loss a run: one envelope point a budget, N* no finer than the sizes that ran",)
    for m in fit.minima:
        assert m.loss == table.loss[table.budget == m.budget].min()
    draws = bootstrap_envelope(table, fit, 200)
    assert draws.scheme == "surface"
    low, high = np.nanpercentile(draws.a, [2.5, 97.5])
    assert low < 0.28 / 0.62 < high


@pytest.mark.parametrize(
    ("budgets", "spread", "reason"),
    [
        ((1e18, 1e19), 4.0, r"needs 3 points or more, 2 found \(no other FLOPs\)"),
        ((1e18, 1e19, 1e20), 0.2, r"0 found .*at the (smallest|largest) N that ran"),
    ],
)
def test_too_few_points_are_refused(budgets: tuple[float, ...], spread: float, reason: str) -> None:
    off = 1.0 if spread > 1 else 20.0
    table = grid(LAW, budgets, sizes=5, spread=max(spread, 1.5), centre=lambda c: off * hoffmann_optimum(c))
    with pytest.raises(FitError, match=reason):
        fit_envelope(table)


def test_two_sizes_have_no_lowest_inside() -> None:
    with pytest.raises(FitError, match="2 sizes, a lowest inside the grid needs 3"):
        fit_envelope(grid(LAW, sizes=2))
