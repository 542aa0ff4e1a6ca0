"""Intervals on simulated sweeps whose truth is known, approach 2's bias, refusals, the verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sweeps.scaling import coverage
from sweeps.scaling.analysis import analyse
from sweeps.scaling.bias import own_grid_bias
from sweeps.scaling.bootstrap import Interval
from sweeps.scaling.bootstrap_isoflop import bootstrap_isoflop
from sweeps.scaling.decided import decided, second_opinion, size_intervals
from sweeps.scaling.holdout import HOLDOUT_FACTOR, Holdout, HoldoutPoint, distance
from sweeps.scaling.isoflop import fit_isoflop
from sweeps.scaling.parametric import fit_parametric
from sweeps.scaling.surfaces import SURFACES, WORLDS, KnownSurface
from sweeps.scaling.table import FitError, Run, RunTable
from sweeps.scaling.verdict import preferred, verdict
from sweeps.scaling.world import draw_world, flat_profile
from tests.sweeps.scaling_helpers import HOFFMANN, grid, surface

BUDGETS = tuple(np.geomspace(1e17, 1e21, 5))
# Relative error of D* at 1e24 FLOPs, percent, for grids of +-2x, 4x, 8x, 16x: noise-free, "Problems with Chinchilla
# Approach 2".
PUBLISHED_BIAS = {
    "symmetric": (0.0, 0.0, 0.0, 0.0),
    "chinchilla": (-0.327, -1.301, -2.903, -5.100),
    "ratio3": (-1.675, -6.498, -13.910, -23.116),
}
WIDTHS = (2, 4, 8, 16)


def clean(known: KnownSurface, width: float, sizes: int = 15) -> RunTable:
    law = surface(known.e, known.a_coef, known.b_coef, known.alpha, known.beta)
    return grid(law, BUDGETS, sizes=sizes, spread=width, centre=lambda c: float(known.n_opt(c)))


@pytest.mark.parametrize("name", list(PUBLISHED_BIAS))
def test_noise_free_bias_is_the_published_one_and_none_for_the_surface(name: str) -> None:
    known = SURFACES[name]
    for width, percent in zip(WIDTHS, PUBLISHED_BIAS[name], strict=True):
        error = 100 * (fit_isoflop(clean(known, width), near=None).d_opt(1e24) / float(known.d_opt(1e24)) - 1)
        assert error == pytest.approx(percent, abs=6e-4)
    fit = fit_parametric(clean(known, 4, sizes=7))
    assert (fit.alpha, fit.beta, fit.e) == pytest.approx((known.alpha, known.beta, known.e), rel=1e-4)


def test_own_grid_bias_is_found_from_the_users_own_noisy_runs() -> None:
    known = SURFACES["ratio3"]
    table = clean(known, 8, sizes=9)
    noise = np.random.default_rng(0).standard_normal(len(table)) * 5e-4
    runs = [replace(r, loss=r.loss * float(np.exp(x))) for r, x in zip(table.runs, noise, strict=True)]
    noisy = RunTable.from_runs(runs)
    bias = own_grid_bias(noisy, fit_parametric(noisy), 1e24, lambda part: fit_isoflop(part, near=None))
    truth = fit_isoflop(table, near=None)
    assert bias is not None
    assert bias.d_opt == pytest.approx(truth.d_opt(1e24) / float(known.d_opt(1e24)) - 1, abs=0.02)
    assert bias.n_opt == pytest.approx(truth.n_opt(1e24) / float(known.n_opt(1e24)) - 1, abs=0.02)
    assert bias.a == pytest.approx(truth.a - known.a, abs=2e-3)


def test_interval_of_a_biased_parabola_holds_the_truth_and_not_the_parabola() -> None:
    known = SURFACES["ratio3"]
    table = clean(known, 8, sizes=9)
    result = analyse(table, ["isoflop"], [1e24], 200, near=None, noise_sd=2e-5).results["isoflop"]
    decision = result.decisions[0]
    assert float(known.n_opt(1e24)) in decision.n_interval and float(known.d_opt(1e24)) in decision.d_interval
    assert decision.n_opt not in decision.n_interval
    assert result.bias is not None and result.bias.n_opt == pytest.approx(decision.n_opt / known.n_opt(1e24) - 1, 0.02)
    plain = bootstrap_isoflop(table, fit_isoflop(table, near=None), 200, scheme="noise", noise_sd=2e-5)
    low, high = np.percentile(plain.decision(1e24)[0], [2.5, 97.5])
    assert not low < float(known.n_opt(1e24)) < high


def test_drawn_surfaces_have_the_spread_of_refitted_ones() -> None:
    table = grid(surface(*HOFFMANN), sizes=9, noise=0.002)
    fit = fit_parametric(table)
    drawn = draw_world(table, fit, np.full(400, 0.002), np.random.default_rng(0)).theta
    refits = [fit_parametric(grid(surface(*HOFFMANN), sizes=9, noise=0.002, seed=s), 8).theta for s in range(1, 17)]
    for column in (3, 4):
        assert drawn[:, column].std() == pytest.approx(np.std(np.array(refits)[:, column]), rel=0.5)


def test_simulated_sweeps_are_covered() -> None:
    """12 sweeps: wide bounds; the full table is `python -m sweeps.scaling.coverage`."""
    store = coverage.Store(None, 200)
    parabolas, fitted = coverage.measure(["ratio3"], ["small"], ["isoflop", "parametric"], 12, 200, 0, 1, store)
    for row in (parabolas, fitted):
        assert row.sweeps + row.refused == 12 and row.refused <= 2
        assert all(row.held[name] >= 0.75 for name in ("a", "n_opt", "d_opt"))
        assert row.n_half < 0.6 and row.loss_half < 0.06
    assert fitted.held["loss"] >= 0.75  # the power law of approach 2 is off here, at 10 times a short sweep


def test_what_is_preferred_is_covered_where_no_form_holds() -> None:
    store = coverage.Store(None, 60)
    (row,) = coverage.measure(["mistuned"], ["small"], ["preferred"], 2, 60, 0, 1, store)
    assert row.sweeps == 2 and "a" not in row.held  # there is no exponent to hold
    assert row.held["loss"] == 1.0 and row.held["n_opt"] >= 0.5
    assert "| mistuned | small | preferred | 2 | - |" in coverage.table_text([row])


def test_the_optimum_of_a_mistuned_surface_is_the_lowest_of_its_budget() -> None:
    world = WORLDS["mistuned"]
    n = np.geomspace(1e7, 1e10, 20_001)
    for c in (1e19, 1e21):
        assert float(world.n_opt(c)) == pytest.approx(n[np.argmin(world.loss(n, c / 6 / n))], rel=1e-3)
    assert float(world.n_opt(1e21)) < 0.99 * float(SURFACES["chinchilla"].n_opt(1e21))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(PUBLISHED_BIAS))
def test_coverage_is_near_nominal(name: str) -> None:
    rows = coverage.measure([name], ["medium"], ["isoflop", "parametric"], 150, 300, 0, 1, coverage.Store(None, 300))
    for row in rows:
        assert set(row.held) == set(coverage.QUANTITIES), row  # a sweep that is refused holds nothing
        for quantity, share in row.held.items():
            assert 0.88 <= share <= 1.0, (row.approach, quantity, share)


def test_coverage_command_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "coverage.json"
    arguments = ["--surface", "symmetric", "--design", "small", "--approach", "isoflop", "--bootstrap", "50"]
    assert coverage.main([*arguments, "--sweeps", "2", "--json", str(out)]) == 0
    first = json.loads(out.read_text())
    assert coverage.main([*arguments, "--sweeps", "3", "--json", str(out)]) == 0
    captured = capsys.readouterr()
    assert "1 of 1 sweeps" in captured.err and "| symmetric | small | isoflop | 3 |" in captured.out
    second = json.loads(out.read_text())
    cell = "symmetric/small/isoflop"
    assert (
        list(second["sweeps"][cell]) == ["0", "1", "2"]
        and first["sweeps"][cell].items() <= second["sweeps"][cell].items()
    )
    assert coverage.main([*arguments[:-1], "60", "--json", str(out)]) == 2
    assert "holds sweeps of --bootstrap 50" in capsys.readouterr().err


def test_shares_outside_the_nominal_range_are_marked() -> None:
    inside, outside = [1.0] * 4 + [0.1, 0.01, 0.0, 0.0], [0.0] * 4 + [0.1, 0.01, 0.0, 0.0]
    row = coverage.summarise("s", "d", "x", [inside] * 95 + [outside] * 5 + [[None] * 8])
    assert row.sweeps == 100 and row.refused == 1 and row.held["a"] == pytest.approx(0.95)
    text = coverage.table_text([row, replace(row, held=dict.fromkeys(coverage.QUANTITIES, 0.91))])
    assert "0.950 |" in text and "0.910* |" in text and "100 (1 refused)" in text


def test_an_interval_is_widened_by_the_held_out_errors_scaled_to_the_target() -> None:
    budgets = np.geomspace(1e17, 1e20, 4)
    points = [HoldoutPoint(1e20, 1e19, 3.0, 3.0, error, 2.0, 1.0) for error in (0.03, -0.01)]
    size = math.sqrt((0.03**2 + 0.01**2) / 2)  # above the last error
    assert Holdout(tuple(points)).relative_error == pytest.approx(size)
    assert distance(budgets, 1e21) == pytest.approx(2.5 * math.log(10))  # from 10^18.5
    wider = Holdout(tuple(points)).widening(1e21, budgets)
    assert wider == pytest.approx(HOLDOUT_FACTOR * size * distance(budgets, 1e21) / 2.0)
    assert Holdout(tuple(points[::-1])).widening(1e21, budgets) == pytest.approx(wider * 0.03 / size)
    assert math.isnan(Holdout(()).widening(1e21, budgets))


def test_fits_that_the_runs_do_not_identify_are_refused() -> None:
    noisy = grid(surface(*HOFFMANN), (1e18, 1.5e18, 2e18), sizes=5, spread=1.3, noise=0.01)
    (reason,) = analyse(noisy, ["parametric"], bootstrap=0).refused.values()
    assert "standard error" in reason or "bound" in reason or "not identified" in reason
    straight = grid(lambda n, d: 40 / n**0.1 + 40 / d**0.1, sizes=7)
    assert "E at its bound" in analyse(straight, ["parametric"], bootstrap=0).refused["parametric"]
    assert (
        flat_profile(grid(surface(*HOFFMANN), noise=0.001), fit_parametric(grid(surface(*HOFFMANN), noise=0.001))) == ""
    )


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [  # name, holdout error, flags
        ([("x", 0.040, ()), ("y", 0.045, ())], "x"),
        ([("x", 0.040, ("one", "two")), ("y", 0.043, ())], "y"),
        ([("x", 0.040, ("one", "two")), ("y", 0.045, ())], "x"),
        ([("x", 0.043, ()), ("y", 0.040, ())], "y"),
        ([("x", 0.010, ("E at its bound",)), ("y", 0.5, ("one",))], "y"),
        ([("x", 0.010, ("E at its bound",))], "x"),
        ([("x", 0.010, ("too many for an interval",)), ("y", 0.5, ("one", "two"))], "y"),
        ([("x", None, ("one",)), ("y", None, ())], "y"),
        ([("x", None, ()), ("y", 0.9, ("one",))], "y"),
    ],
)
def test_errors_that_hardly_differ_do_not_decide_which_approach_is_preferred(rows: list, chosen: str) -> None:
    results = []
    for name, error, flags in rows:
        holdout = Holdout(() if error is None else (HoldoutPoint(2.0, 1.0, 1.0, 1.0, error, 1.0, 1.0),))
        ends = Interval(math.nan if "too many for an interval" in flags else 0.4, 0.6)
        results.append(
            SimpleNamespace(approach=name, holdout=holdout, flags=flags, budgets=(1.0, 2.0), a_interval=ends)
        )
    assert preferred(results).approach == chosen


def test_the_size_to_act_on_is_as_wide_as_the_measured_minima_ask_for() -> None:
    table = grid(surface(*HOFFMANN), sizes=7, spread=3, noise=0.002)
    analysis = analyse(table, ["isoflop", "isoflop_akima", "parametric"], [1e21], bootstrap=100)
    surface_fit, parabolas = analysis.results["parametric"], analysis.results["isoflop"]
    assert second_opinion(analysis, surface_fit) is parabolas and second_opinion(analysis, parabolas) is None
    n, d = size_intervals(analysis, surface_fit, 1e21)
    for ends, first, second in zip(
        (n, d), surface_fit.size_intervals(1e21), parabolas.size_intervals(1e21), strict=True
    ):
        assert (ends.low, ends.high) == (min(first.low, second.low), max(first.high, second.high))
    alone = replace(parabolas, a_interval=Interval(math.nan, math.nan))
    without = replace(analysis, results={**analysis.results, "isoflop": alone})
    assert second_opinion(without, surface_fit) is analysis.results["isoflop_akima"]
    (acted,) = decided(analysis)
    assert acted.n_interval == size_intervals(analysis, analysis.best, 1e21)[0]
    assert acted.loss_interval == analysis.best.decisions[0].loss_interval


def test_verdict_names_all_approaches_and_those_apart() -> None:
    table = grid(surface(*HOFFMANN), sizes=7, spread=3, noise=0.002)
    analysis = analyse(table, ["isoflop", "isoflop_akima", "parametric"], bootstrap=100)
    assert set(analysis.results) == {"isoflop", "isoflop_akima", "parametric"}
    assert "DISAGREE" not in analysis.verdict and " is preferred (holdout error " in analysis.verdict
    for name in analysis.results:
        assert f"{name} 0." in analysis.verdict
    results = analysis.results
    far = {**results, "parametric": replace(results["parametric"], a_interval=Interval(0.7, 0.8))}
    said = verdict(far, {})
    assert said.startswith("approaches DISAGREE")
    assert "apart are isoflop and parametric; isoflop_akima and parametric;" in said
    assert "cannot be compared" in analyse(table, ["isoflop", "parametric"], bootstrap=0).verdict
    only = analyse(grid(surface(*HOFFMANN), (1e18, 1e20), sizes=7), ["envelope", "isoflop"], bootstrap=0)
    assert "only isoflop gave an answer (envelope refused)" in only.verdict


def test_every_refusal_has_a_reason_and_every_excluded_row_too() -> None:
    runs = [Run("dead", 1e7, 1e9, 6e16, float("nan"), 6e16), *grid(surface(*HOFFMANN), (1e18,), sizes=2).runs]
    analysis = analyse(RunTable.from_runs(runs), bootstrap=0)
    assert not analysis.results and all(analysis.refused.values())
    assert [(e.run, e.reason) for e in analysis.table.excluded] == [("dead", "loss is NaN (diverged)")]
    with pytest.raises(
        FitError, match=r"no approach gave an answer: envelope: .*isoflop, isoflop_akima: .*parametric: "
    ):
        analysis.best  # noqa: B018
