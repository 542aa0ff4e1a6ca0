"""Approach 2 by splines: Porian et al.'s ten published exponents and their intervals, and the refusals."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from sweeps.scaling.akima import fit_akima, spline_minima, weighted_lines
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, hoffmann_optimum, published, surface

KEYS = ("file", "dataset", "hparams", "warmup", "decay", "count", "loss_kind")
PROTOCOLS = (
    ("base", "long", "kaplan", "kaplan", "train"),
    ("base", "long", "kaplan", "standard", "val"),
    ("base", "short", "kaplan", "standard", "val"),
    ("base", "short", "chinchilla", "standard", "val"),
    ("tuned", "short", "const", "standard", "val"),
)
# sd of the loss itself between seeds, as published for losses of these sizes.
SEED_SD = {"rw": 0.002, "owt2": 0.01}
FILES = {"rw": "summary_df", "owt2": "summary_df_owt2"}


@pytest.mark.parametrize("dataset", ["rw", "owt2"])
@pytest.mark.parametrize("protocol", PROTOCOLS, ids="-".join)
def test_porians_published_exponents_and_intervals(dataset: str, protocol: tuple[str, ...]) -> None:
    key = (FILES[dataset], dataset, *protocol)
    with published("porian_isoflop.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if tuple(row[k] for k in KEYS) == key]
    with published("porian_published_exponents.csv").open() as file:
        (expected,) = [row for row in csv.DictReader(file) if tuple(row[k] for k in KEYS) == key]
    columns = ("N_params", "D_tokens", "C_flops", "loss", "C_flops")
    table = RunTable.from_runs(Run(str(i), *(float(row[k]) for k in columns)) for i, row in enumerate(rows))
    fit = fit_akima(table, SEED_SD[dataset] / table.loss)
    assert fit.a == pytest.approx(float(expected["a_exponent"]), abs=5e-3)
    assert fit.b == pytest.approx(float(expected["tokens_exponent"]), abs=5e-3)
    low, high = np.percentile(fit.exponent_draws(), [2.5, 97.5])
    assert low == pytest.approx(float(expected["a_ci95_lo"]), abs=0.01)
    assert high == pytest.approx(float(expected["a_ci95_hi"]), abs=0.01)


def test_a_spline_has_less_bias_than_its_own_step_and_no_parabola_s() -> None:
    table = grid(surface(*HOFFMANN), sizes=15, spread=16)
    fit = fit_akima(table, 1e-6, k=20)
    assert fit.a == pytest.approx(0.28 / 0.62, abs=2e-3)
    assert fit.n_opt(1e20) == pytest.approx(hoffmann_optimum(1e20), rel=0.02)
    assert fit.a + fit.b == pytest.approx(1.0, abs=2e-3)


def test_minima_of_known_curves() -> None:
    x = np.linspace(0.0, 6.0, 7)
    found, loss = spline_minima(x, np.stack([(x - 3) ** 2, x, -((x - 3) ** 2)]))
    assert found[0] == pytest.approx(3.0, abs=0.03) and loss[0] == pytest.approx(0.0, abs=1e-2)
    assert np.isnan(found[1:]).all()  # lowest at an edge


def test_weights_and_gaps_of_lines() -> None:
    x = np.array([0.0, 1.0, 2.0])
    y = np.array([[1.0, 3.0, 5.0], [1.0, np.nan, 5.0], [np.nan, np.nan, 5.0], [0.0, 0.0, 9.0]])
    intercept, slope = weighted_lines(x, y, np.array([1.0, 1.0, 1e6]))
    assert slope[:2] == pytest.approx([2.0, 2.0]) and intercept[:2] == pytest.approx([1.0, 1.0])
    assert np.isnan(slope[2])
    assert slope[3] == pytest.approx(0.0, abs=1e-6)  # the point of no weight has none


def test_budgets_are_refused_with_reasons() -> None:
    good = grid(surface(*HOFFMANN), (1e18, 1e19, 1e20), sizes=7).runs
    edge = [Run(f"e{n}", n, 1e21 / 6 / n, 1e21, 4 - 0.1 * math.log(n), 1e21) for n in (1e8, 2e8, 4e8, 8e8)]
    few = [Run(f"f{n}", n, 1e22 / 6 / n, 1e22, 2.5, 1e22) for n in (1e9, 2e9)]
    fit = fit_akima(RunTable.from_runs([*good, *edge, *few]), 1e-4, k=20)
    assert [m.ok for m in fit.minima] == [True, True, True, False, False]
    assert "at an edge of the grid (1e+08 to 8e+08)" in fit.minima[3].reason
    assert "2 sizes, a spline's minimum needs 3" in fit.minima[4].reason
    with pytest.raises(FitError, match=r"isoflop_akima needs minima at 2 budgets or more, 0 found .*at an edge"):
        fit_akima(RunTable.from_runs(edge), 1e-4, k=20)
