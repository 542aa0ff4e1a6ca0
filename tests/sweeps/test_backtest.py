"""Forecasts of a finished sweep's larger budgets from its smaller ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from sweeps import backtest as command
from sweeps.scaling.backtest import FITTED, backtest
from sweeps.scaling.table import FitError
from tests.sweeps.scaling_helpers import HOFFMANN, grid, hoffmann_optimum, llama_3, surface

BUDGETS = tuple(np.geomspace(1e18, 1e20, 6))


def test_every_larger_budget_is_forecast_from_the_smaller_ones() -> None:
    table = grid(surface(*HOFFMANN), BUDGETS, sizes=7, spread=4, noise=0.002)
    trials = list(backtest(table, bootstrap=60))
    pairs = [(t.from_budget, t.budget) for t in trials]
    expected = [(BUDGETS[i], BUDGETS[j]) for i in (3, 4) for j in range(i + 1, 6)]
    assert np.allclose(pairs, expected)
    for t in trials:
        measured = [r.loss for r, c in zip(table.runs, table.budget, strict=True) if math.isclose(c, t.budget)]
        assert t.measured == min(measured)
        assert t.n_measured == pytest.approx(hoffmann_optimum(t.budget), rel=0.3)
        assert t.inside and t.n_inside and t.loss in t.interval


def test_too_few_budgets() -> None:
    with pytest.raises(FitError, match=f"4 budgets; forecasting one from {FITTED} smaller ones needs 5"):
        list(backtest(grid(surface(*HOFFMANN), BUDGETS[:4], sizes=5)))


def test_llama_3_s_largest_budgets_are_forecast() -> None:
    """Measured by others: the last three budgets from those below."""
    table = llama_3()
    budgets = table.budgets
    short = table.where(table.budget >= budgets[3])
    trials = list(backtest(short, bootstrap=60))
    assert len(trials) == 6 and all(t.inside for t in trials)
    assert sum(bool(t.n_inside) for t in trials) >= 4
    assert all(t.interval.high / t.interval.low < 1.25 for t in trials)


def test_command_takes_sweeps_apart_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["family,N_params,D_tokens,C_flops,loss,C_budget"]
    for name, budgets in (("long", BUDGETS[:5]), ("short", BUDGETS[:3])):
        for run in grid(surface(*HOFFMANN), budgets, sizes=5, spread=3, noise=0.001).runs:
            row = (run.n_params, run.d_tokens, run.c_flops, run.loss, run.budget)
            lines.append(f"{name}," + ",".join(f"{value!r}" for value in row))
    runs, out = tmp_path / "runs.csv", tmp_path / "backtest.json"
    runs.write_text("\n".join(lines).replace("np.float64(", "").replace(")", ""))
    options = ["--runs", str(runs), "--columns.budget", "C_budget", "--bootstrap", "60"]
    drawn = tmp_path / "figures" / "backtest.png"
    assert command.main([*options, "--by", "family", "--json", str(out), "--plot", str(drawn)]) == 0
    assert drawn.read_bytes()[:4] == b"\x89PNG" and drawn.stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "short: 3 budgets; forecasting one from 4 smaller ones needs 5" in said
    assert "| long | 1 of 1 | 1 of 1 |" in said and "10x" not in said
    (trial,) = json.loads(out.read_text())["long"]
    assert trial["inside"] is True and trial["interval"]["low"] < trial["measured"] < trial["interval"]["high"]
    assert command.main([*options, "--by", "colour"]) == 2
    assert "--by colour: no such column; there are" in capsys.readouterr().err
    assert command.main([*options, "--by", "family", "--where", "family == 'short'"]) == 2
    assert "nothing could be forecast" in capsys.readouterr().err
