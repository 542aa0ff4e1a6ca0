"""Repeated data: the published runs, limits of the form, recovery, the flat profile."""

from __future__ import annotations

import numpy as np
import pytest

from sweeps.records import read_runs
from sweeps.scaling.repeats import RepeatProblem, RepeatSurface, bootstrap_repeats, fit_repeats, loss_interval
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, published

MUENNIGHOFF = RepeatSurface(float(np.exp(0.6254804)), *np.exp([6.255414, 7.3049974]).tolist(), 0.3526596, 0.3526596)
CHINCHILLA = RepeatSurface(*HOFFMANN)


def test_published_runs() -> None:
    table = read_runs(str(published("datablations_runs182.csv")))
    assert len(table) == 182
    problem = RepeatProblem(table, MUENNIGHOFF)
    for point, published_value in (((15.39, 5.31), 0.0158259), ((46.99, 2.33), 0.0158074), ((95.4, 1.71), 0.0158047)):
        assert problem.value(np.log([point]))[0] * 1e-6 == pytest.approx(published_value, abs=5e-8)
    fit = fit_repeats(table, MUENNIGHOFF)
    assert fit.objective <= 0.0158047 and fit.agreeing >= 2 and fit.gradient <= 1e-5
    # Nearly flat: the published point is inside both profiles, and the fit says that it tells little apart.
    assert fit.profile_d.low < 15.39 < fit.profile_d.high and fit.profile_n.low < 5.31 < fit.profile_n.high
    assert fit.profile_d.objective.min() >= fit.objective * (1 - 1e-9)
    assert [flag for flag in fit.flags if flag.startswith("flat profile: R_D*")]


def test_fresh_data_is_the_plain_surface() -> None:
    n, d = np.array([1e8, 1e9]), np.array([1e10, 2e10])
    e, a, b, alpha, beta = HOFFMANN
    fresh = CHINCHILLA.loss(n, d, d, np.float64(15.0), np.float64(1e12))
    assert fresh == pytest.approx(e + a / n**alpha + b / d**beta, rel=1e-9)
    # N*(U) spends the budget at which U is the optimal number of tokens (facts: 1e21 FLOPs, 1.824B on 91.4B).
    assert float(CHINCHILLA.fresh_size(np.float64(91.4e9))) == pytest.approx(1.824e9, rel=3e-3)


def test_four_epochs_are_nearly_fresh_and_sixteen_add_little() -> None:
    e, a, b, alpha, beta = HOFFMANN
    unique, size = 1e10, np.float64(1e8)

    def worth(epochs: float) -> float:
        """Fresh tokens with the loss of that many epochs, over the tokens drawn."""
        loss = CHINCHILLA.loss(size, np.float64(epochs * unique), np.float64(unique), np.float64(15.39), np.float64(5.31))
        fresh = (b / (float(loss) - e - a / 1e8**alpha)) ** (1 / beta)
        return fresh / (epochs * unique)

    assert worth(4) == pytest.approx(0.93, abs=0.02)
    assert worth(1) == pytest.approx(1.0)
    assert worth(64) < 0.3


def made(noise: float, seed: int = 0) -> RunTable:
    generator = np.random.default_rng(seed)
    runs = []
    for unique in (1e8, 1e9, 1e10):
        best = float(CHINCHILLA.fresh_size(np.float64(unique)))
        for n in best * np.array([0.3, 1, 3, 10, 30]):
            for epochs in (1, 2, 4, 8, 16, 32, 64):
                d = epochs * unique
                loss = CHINCHILLA.loss(np.float64(n), np.float64(d), np.float64(unique), np.float64(12.0), np.float64(4.0))
                loss = loss * np.exp(noise * generator.standard_normal())
                runs.append(Run(str(len(runs)), n, d, 6 * n * d, float(loss), unique_tokens=unique))
    return RunTable.from_runs(runs)


def test_known_constants_are_recovered() -> None:
    fit = fit_repeats(made(0.0), CHINCHILLA)
    assert (fit.r_d, fit.r_n) == pytest.approx((12.0, 4.0), rel=1e-4)
    assert not fit.flags
    table = made(0.002, seed=1)
    noisy = fit_repeats(table, CHINCHILLA)
    draws = bootstrap_repeats(table, noisy, 200)
    low, high = np.nanpercentile(draws, [2.5, 97.5], axis=0)
    assert low[0] < 12 < high[0] and low[1] < 4 < high[1] and not np.isnan(draws).any()
    truth = fit.loss(1e9, 4e10, 2e9)
    assert truth in loss_interval(noisy, draws, 1e9, 4e10, 2e9)


def test_runs_without_repeats_are_refused() -> None:
    table = made(0.0)
    fresh = table.where(table.d == table.optional("unique_tokens"))
    with pytest.raises(FitError, match=r"needs 6 runs or more that repeat tokens \(column unique_tokens\), got 0"):
        fit_repeats(fresh, CHINCHILLA)
