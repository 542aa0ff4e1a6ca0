"""Intervals, holdout errors, and the analysis that joins them."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from sweeps.scaling.analysis import Surface, analyse, widen
from sweeps.scaling.bootstrap import Interval, choose_scheme, draw_counts, interval
from sweeps.scaling.bootstrap_isoflop import bootstrap_isoflop, estimate_noise
from sweeps.scaling.bootstrap_parametric import bootstrap_parametric
from sweeps.scaling.holdout import Holdout, rolling
from sweeps.scaling.isoflop import fit_isoflop
from sweeps.scaling.optimum import FlopRule, flop_rule
from sweeps.scaling.parametric import fit_parametric
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, chinchilla, grid, hoffmann_optimum, surface

SMALL = (1e18, 3e18, 1e19, 3e19)


def small(noise: float = 0.002, seed: int = 0) -> RunTable:
    """A sweep of the demo's size: 4 budgets, 5 sizes."""
    return grid(surface(*HOFFMANN), SMALL, sizes=5, spread=3, noise=noise, seed=seed)


def test_epochs_intervals_and_speed() -> None:
    table = chinchilla()
    fit = fit_parametric(table)
    started = time.process_time()
    theta = bootstrap_parametric(table, fit, flop_rule(table), k=4000, scheme="rows").theta
    assert time.process_time() - started < 20  # about 1.5 s; the reference procedure takes minutes
    assert not np.isnan(theta).any()
    low, high = np.percentile(theta, [2.5, 97.5], axis=0)
    assert (low[3], high[3]) == pytest.approx((0.317, 0.373), abs=3e-3)
    assert (low[4], high[4]) == pytest.approx((0.331, 0.415), abs=3e-3)
    assert np.exp([low[2], high[2]]) == pytest.approx([1.769, 1.871], abs=6e-3)


def test_scheme_follows_the_grid() -> None:
    assert choose_scheme(small()) == "noise"
    assert choose_scheme(grid(surface(*HOFFMANN), sizes=9)) == "rows"
    assert choose_scheme(small(), "rows") == "rows"
    with pytest.raises(ValueError, match="unknown bootstrap scheme 'jackknife'; choose rows, noise or auto"):
        choose_scheme(small(), "jackknife")


def test_rows_are_drawn_by_run_inside_budgets() -> None:
    runs = [Run(f"{c:g}-{i // 2}", 1e3, 1e6, c, 3.0, c) for c in (1e9, 1e10) for i in range(8)]
    runs += [Run("trunk", 1e3, 1e6, c, 3.0, c) for c in (1e9, 1e10)]
    counts = draw_counts(RunTable.from_runs(runs), 200, np.random.default_rng(0))
    assert (counts[:, 0:8:2] == counts[:, 1:8:2]).all()  # both rows of a run together
    assert (counts[:, :8].sum(axis=1) == 8).all() and (counts[:, 8:16].sum(axis=1) == 8).all()
    assert (counts[:, 16] == counts[:, 17]).all()  # one run in two budgets
    assert len(np.unique(counts[:, 0])) > 2


def test_equal_seeds_give_equal_intervals() -> None:
    table = small()
    fit = fit_isoflop(table)
    first, again, other = (bootstrap_isoflop(table, fit, 100, seed).a for seed in (0, 0, 1))
    assert np.array_equal(first, again, equal_nan=True) and not np.array_equal(first, other, equal_nan=True)


def test_noise_comes_from_seeds_where_there_are_seeds() -> None:
    one = small(0.002, 0)
    fit = fit_isoflop(one)
    assert estimate_noise(one, fit).source == "parabola residuals"
    others = [Run(f"{r.run}-s", r.n_params, r.d_tokens, r.c_flops, r.loss, r.budget) for r in small(0.002, 1).runs]
    noise = estimate_noise(RunTable.from_runs([*one.runs, *others]), fit)
    assert (noise.source, noise.dof) == ("repeated seeds", 20)
    assert noise.sd == pytest.approx(0.002, rel=0.5)


def test_noise_that_cannot_be_known_is_refused() -> None:
    table = grid(surface(*HOFFMANN), SMALL, sizes=3, spread=2)
    with pytest.raises(FitError, match="no degrees of freedom left for the noise"):
        bootstrap_isoflop(table, fit_isoflop(table), 10, scheme="noise")
    assert estimate_noise(table, fit_isoflop(table), fit_parametric(table)).source == "surface residuals"
    assert bootstrap_isoflop(table, fit_isoflop(table), 10, noise_sd=0.002).noise_sd == pytest.approx(0.002, rel=0.01)


def test_more_noise_gives_wider_intervals() -> None:
    widths = []
    for noise in (0.0005, 0.004):
        table = small(noise, 3)
        a = interval(bootstrap_isoflop(table, fit_isoflop(table), 200).a)
        widths.append(a.high - a.low)
    assert widths[1] > 3 * widths[0]


def test_intervals_refuse_when_too_many_replicates_fail() -> None:
    values = np.arange(100.0)
    assert interval(values).low == pytest.approx(2.475)
    values[:30] = np.nan
    assert np.isnan(interval(values).low)


def test_decision_intervals_hold_the_point_estimate() -> None:
    result = analyse(small(), budgets=[1e20], bootstrap=200).results["parametric"]
    d = result.decisions[0]
    assert d.n_opt in d.n_interval and d.d_opt in d.d_interval and d.loss in d.loss_interval
    true = hoffmann_optimum(1e20)
    assert true in d.n_interval
    assert d.n_opt * d.d_opt * 6 == pytest.approx(1e20, rel=1e-9)


def test_holdout_never_sees_the_held_out_budget() -> None:
    table = small()
    seen: list[float] = []

    def fit(part: RunTable) -> Surface:
        seen.append(float(part.budgets.max()))
        return Surface(fit_parametric(part), FlopRule())

    holdout = rolling(table, fit_isoflop(table).minima, fit)
    assert seen == [3e18, 1e19]
    assert [p.budget for p in holdout.points] == [1e19, 3e19]
    assert holdout.last is not None and abs(holdout.last.error) < 0.02


def test_holdout_is_near_zero_for_the_right_form_and_not_for_the_wrong_one() -> None:
    table = grid(surface(*HOFFMANN), sizes=9, spread=3)
    right = analyse(table, ["parametric"], bootstrap=0).results["parametric"].holdout
    wrong = analyse(table, ["isoflop"], bootstrap=0, loss_form="power").results["isoflop"].holdout
    assert right.relative_error < 2e-4 < 10 * right.relative_error + 2e-3 < wrong.relative_error


def test_forecast_interval_takes_the_holdout_error_in() -> None:
    table = grid(surface(*HOFFMANN), SMALL, sizes=5, spread=3, noise=0.0005)
    result = analyse(table, ["isoflop"], budgets=[1e20, 1e21], bootstrap=200, loss_form="power").results["isoflop"]
    near, far = result.decisions
    assert near.loss == result.model.loss_opt(1e20)  # a power law's, which bends away from the surface
    assert far.holdout_error > 1.5 * near.holdout_error
    assert near.loss in near.loss_interval and far.loss in far.loss_interval
    truth = surface(*HOFFMANN)(hoffmann_optimum(1e20), 1e20 / 6 / hoffmann_optimum(1e20))
    assert truth in near.loss_interval and abs(truth / near.loss - 1) > 0.01
    without = replace(result, holdout=Holdout(())).forecast_interval(near.n_opt, near.d_opt, 1e20)
    assert truth not in without


def test_widen_adds_in_quadrature() -> None:
    wide = widen(Interval(9.0, 13.0), 10.0, 4.0)
    assert (wide.low, wide.high) == pytest.approx((10 - 17**0.5, 15.0))


def test_refused_approaches_are_listed_with_reasons() -> None:
    analysis = analyse(grid(surface(*HOFFMANN), (1e19,), sizes=5), bootstrap=0)
    assert "2 budgets or more" in analysis.refused["isoflop"]
    with pytest.raises(FitError, match="no approach gave an answer"):
        analyse(RunTable.from_runs([]), bootstrap=0).best  # noqa: B018
    with pytest.raises(ValueError, match="unknown approach 'guess'"):
        analyse(small(), ["guess"])


def test_near_minimum_leaves_far_cells_out() -> None:
    table = grid(surface(*HOFFMANN), sizes=9, spread=32)
    near = table.near_minimum(0.05)
    assert 0 < len(near) < len(table)
    assert len(near) + len(near.excluded) == len(table)
    assert near.excluded[0].reason == "loss more than 5% above its budget's lowest"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("constants", [(1.69, 406.4, 410.7, 0.31, 0.31), HOFFMANN])
def test_coverage_of_small_sweeps(constants: tuple[float, ...]) -> None:
    """60 simulated sweeps of 20 runs: 95% intervals of N*, and of a run's loss at 3 times the largest budget."""
    law, target = surface(*constants), 1e20
    _, a, b, alpha, beta = constants

    def best(c: float) -> float:
        return (alpha * a / (beta * b)) ** (1 / (alpha + beta)) * (c / 6) ** (beta / (alpha + beta))

    true_n, noise = best(target), 0.002
    true_d = target / 6 / true_n
    covered: dict[str, list[tuple[bool, float]]] = {"isoflop": [], "parametric": []}
    for seed in range(60):
        table = grid(law, SMALL, sizes=5, spread=3, noise=noise, seed=seed, centre=best)
        for name, result in analyse(table, ("isoflop", "parametric"), [target], bootstrap=200).results.items():
            ends = result.forecast_interval(true_n, true_d, target)
            low, high = np.log(np.array([ends.low, ends.high]) / law(true_n, true_d)) / noise
            # The chance that a run measured there, with its noise, lands inside: a drawn one would be 60 coins more.
            covered[name].append((true_n in result.decisions[0].n_interval, norm.cdf(high) - norm.cdf(low)))
    for name, held in covered.items():
        n, loss = np.mean(held, axis=0)
        assert n >= 0.85 and loss >= 0.9, (name, n, loss)
