"""Approach 2: published exponents, recovery, refusals, and its known bias."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

from sweeps.scaling.isoflop import fit_isoflop, nearest_to_lowest
from sweeps.scaling.laws import fit_loss_law, fit_power_line
from sweeps.scaling.simulated import DESIGNS, simulate
from sweeps.scaling.surfaces import SURFACES
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, hoffmann_optimum, llama_3, published, surface

SYMMETRIC = (1.69, 406.4, 410.7, 0.31, 0.31)


def test_llama_3_exponents() -> None:
    fit = fit_isoflop(llama_3(), near=None)
    assert fit.a == pytest.approx(0.4632, abs=5e-4)
    assert fit.b == pytest.approx(0.5368, abs=5e-4)
    assert fit.n_opt(3.8e25) == pytest.approx(393e9, rel=0.01)
    assert fit.d_opt(3.8e25) == pytest.approx(16.1e12, rel=0.01)


def _optimum(constants: tuple[float, ...], c: float) -> float:
    _, a, b, alpha, beta = constants
    return (alpha * a / (beta * b)) ** (1 / (alpha + beta)) * (c / 6) ** (beta / (alpha + beta))


def test_symmetric_surface_is_recovered_exactly() -> None:
    # alpha = beta: the curve is symmetric around its minimum, so the parabola's vertex is exact.
    table = grid(surface(*SYMMETRIC), centre=lambda c: _optimum(SYMMETRIC, c))
    fit = fit_isoflop(table, near=None)
    assert fit.a == pytest.approx(0.5, abs=1e-9)
    assert fit.n_opt(1e21) == pytest.approx(_optimum(SYMMETRIC, 1e21), rel=1e-6)
    assert fit.a + fit.b == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("width", "error_percent"), [(2, -0.327), (4, -1.301), (8, -2.903), (16, -5.100)])
def test_noise_free_bias_on_chinchillas_surface_is_the_published_one(width: int, error_percent: float) -> None:
    budgets = tuple(np.geomspace(1e17, 1e21, 5))
    table = grid(surface(*HOFFMANN), budgets, sizes=15, spread=width)
    true = 1e24 / 6 / _optimum(HOFFMANN, 1e24)
    error = 100 * (fit_isoflop(table, near=None).d_opt(1e24) / true - 1)
    assert error == pytest.approx(error_percent, abs=6e-4)


def test_nearest_points_have_less_bias_than_all() -> None:
    table = grid(surface(*HOFFMANN), sizes=15, spread=16)
    near, every = (abs(fit_isoflop(table, near=k).n_opt(1e20) / hoffmann_optimum(1e20) - 1) for k in (5, None))
    assert near < 0.5 * every


@pytest.mark.parametrize(("surface_name", "design"), [("chinchilla", "medium"), ("ratio3", "small")])
def test_four_sizes_miss_by_more_than_five(surface_name: str, design: str) -> None:
    """On grids of 6 or 7 sizes that are not quite geometric, as real shapes are; N* at ten times the largest budget."""
    known, shape = SURFACES[surface_name], DESIGNS[design]
    target = shape.reach * 10**shape.decades * 1e18
    errors: dict[int, list[float]] = {4: [], 5: []}
    for seed in range(60):
        generator, runs = np.random.default_rng(seed), []
        for run in simulate(known, shape, seed)[0].runs:
            n = run.n_params * math.exp(0.05 * generator.standard_normal())
            d = run.c_flops / (6 * n)
            loss = float(known.loss(n, d)) * math.exp(shape.noise * generator.standard_normal())
            runs.append(replace(run, n_params=n, d_tokens=d, loss=loss))
        table = RunTable.from_runs(runs)
        for near, found in errors.items():
            found.append(math.log(fit_isoflop(table, near).n_opt(target) / float(known.n_opt(target))))
    four, five = (float(np.sqrt(np.mean(np.square(errors[near])))) for near in (4, 5))
    assert 1.3 * five < four < 2 * five  # as docs/scaling.md says


def test_loss_at_the_optimum_and_off_it() -> None:
    law = surface(*HOFFMANN)
    fit = fit_isoflop(grid(law, sizes=9, spread=2), near=None)
    assert fit.loss_law.form == "saturating"
    best = _optimum(HOFFMANN, 1e20)
    assert fit.loss_opt(1e20) == pytest.approx(law(best, 1e20 / 6 / best), rel=1e-3)
    off = 1.6 * best
    assert fit.loss_at(off, 1e20 / 6 / off, 1e20) == pytest.approx(law(off, 1e20 / 6 / off), rel=2e-3)


def _curve(losses: list[float], sizes: list[float]) -> list[Run]:
    pairs = enumerate(zip(sizes, losses, strict=True))
    return [Run(f"r{i}", n, 1e9 / (6 * n), 1e9, loss, 1e9) for i, (n, loss) in pairs]


GOOD = [
    run
    for c in (1e10, 1e11)
    for run in (
        Run(f"{c}-{x}", 1e3 * x, c / (6e3 * x), c, 4 - 0.1 * math.log10(c) + 0.1 * math.log(x / 2) ** 2, c)
        for x in (0.5, 1.0, 2.0, 4.0, 8.0)
    )
]


@pytest.mark.parametrize(
    ("losses", "sizes", "reason"),
    [
        ([4.0, 3.9], [1e3, 2e3], "2 sizes, a parabola needs 3"),
        ([3.0, 3.9, 4.0, 3.0], [1e3, 2e3, 4e3, 8e3], "opens downwards"),
        ([4.0, 3.6, 3.3, 3.1], [1e3, 2e3, 4e3, 8e3], "lies above the grid"),
        ([3.1, 3.3, 3.6, 4.0], [1e3, 2e3, 4e3, 8e3], "lies below the grid"),
        ([3.9, 3.8, 3.7], [1e3, 1e3, 1e3], "1 sizes"),
    ],
)
def test_bad_curves_are_refused_with_a_reason(losses: list[float], sizes: list[float], reason: str) -> None:
    fit = fit_isoflop(RunTable.from_runs(GOOD + _curve(losses, sizes)))
    assert [m.ok for m in fit.minima] == [False, True, True]
    assert reason in fit.minima[0].reason
    assert math.isnan(fit.minima[0].n_opt)


def test_too_few_minima_are_an_error_that_gives_each_reason() -> None:
    with pytest.raises(FitError, match=r"2 budgets or more, 0 found .*lies above the grid.*add larger N"):
        fit_isoflop(RunTable.from_runs(_curve([4.0, 3.6, 3.3, 3.1], [1e3, 2e3, 4e3, 8e3])))


def test_seeds_of_one_size_are_one_point_of_the_choice() -> None:
    x = np.array([1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    y = np.array([3.0, 3.1, 2.9, 2.5, 2.4, 2.6, 3.5])
    assert list(nearest_to_lowest(x, y, 3)) == [3, 4, 5]
    assert list(nearest_to_lowest(x, y, None)) == list(range(7))


def test_table_excludes_rows_with_reasons() -> None:
    table = RunTable.from_runs(
        [
            Run("ok", 1e3, 1e6, 6e9, 3.0, 6e9),
            Run("nan", 1e3, 1e6, 6e9, math.nan, 6e9),
            Run("inf", 1e3, 1e6, 6e9, 1.797e308, 6e9),
            Run("zero", 1e3, 1e6, 6e9, 0.0, 6e9),
            Run("no tokens", 1e3, 0.0, 6e9, 3.0, 6e9),
            Run("off", 1e3, 1e6, 6e9, 3.0, 9e9),
        ]
    )
    assert [run.run for run in table.runs] == ["ok"]
    reasons = {e.run: e.reason for e in table.excluded}
    assert reasons["nan"] == "loss is NaN (diverged)"
    assert reasons["inf"] == "loss is infinite (diverged)"
    assert reasons["zero"] == "loss is 0, not positive"
    assert reasons["no tokens"] == "D is 0, not a positive number"
    assert reasons["off"] == "FLOPs are -33% off the budget (at most 10%)"


def test_budgets_are_grouped_from_flops_when_there_is_no_column() -> None:
    runs = [Run(f"{c}{k}", 1e3, 1e6, c * k, 3.0) for c in (1e9, 3e9) for k in (0.99, 1.0, 1.01)]
    assert RunTable.from_runs(runs).budgets == pytest.approx([1e9, 3e9], rel=1e-3)


def test_power_line_and_loss_laws_recover_their_constants() -> None:
    c = np.geomspace(1e18, 1e21, 6)
    line = fit_power_line(c, 3.0 * c**0.45)
    assert (line.exponent, math.exp(line.log_coefficient)) == pytest.approx((0.45, 3.0), rel=1e-9)
    law = fit_loss_law(c, 1.7 + 900 * c**-0.155)
    assert (law.form, law.e, law.gamma) == ("saturating", pytest.approx(1.7, abs=1e-5), pytest.approx(0.155, abs=1e-5))
    assert fit_loss_law(c, 900 * c**-0.155).form == "power"
    assert fit_loss_law(c[:4], (1.7 + 900 * c**-0.155)[:4]).form == "power"
    with pytest.raises(FitError, match="do not identify an irreducible loss"):
        fit_loss_law(c[:3], 900 * c[:3] ** -0.155, "saturating")


def test_porian_tuned_protocol_is_near_its_published_exponent() -> None:
    # A parabola through all points; the published protocol is a spline, so only its neighbourhood is asked for.
    with published("porian_isoflop.csv").open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["file"] == "summary_df" and row["dataset"] == "rw"
            and (row["hparams"], row["warmup"], row["decay"], row["count"]) == ("tuned", "short", "const", "standard")
            and row["loss_kind"] == "val"
        ]  # fmt: skip
    table = RunTable.from_runs(
        Run(str(i), *(float(row[k]) for k in ("N_params", "D_tokens", "C_flops", "loss", "C_flops")))
        for i, row in enumerate(rows)
    )
    assert fit_isoflop(table, near=None).a == pytest.approx(0.514, abs=5e-3)
