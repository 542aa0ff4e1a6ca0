"""A fit as an MLflow model: written, loaded by a process that has no checkout, equal to the fit's own numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sweeps import fit_model
from sweeps.fit import fit_experiment
from sweeps.fit_report import FitReport
from sweeps.scaling import store
from sweeps.scaling.table import FitError
from tests.sweeps.scaling_helpers import HOFFMANN, grid, surface

BUDGET = 1e21
# Loads each folder, predicts, prints JSON and where its code came from. The folder of the checkout is not importable.
FRESH = """
import json, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import mlflow, pandas as pd
answers = []
for folder in sys.argv[2:]:
    model = mlflow.pyfunc.load_model(folder)
    losses = model.predict(pd.DataFrame({"N": [10**9, 2 * 10**9], "D": [2e10, 5e10]}))
    optima = model.predict(pd.DataFrame({"budget": [float(sys.argv[1])]}))
    answers.append([losses.to_dict("list"), optima.to_dict("list")])
import sweeps
print(json.dumps([answers, sweeps.__file__]))
"""


@pytest.fixture(scope="module")
def report() -> FitReport:
    return fit_experiment(grid(surface(*HOFFMANN), noise=0.003, sizes=6), budgets=[BUDGET], bootstrap=60)


def test_a_fresh_process_gives_the_fits_own_numbers(report: FitReport, tmp_path: Path) -> None:
    results = report.analysis.results
    folders = [str(tmp_path / name) for name in results]
    for result, folder in zip(results.values(), folders, strict=True):
        fit_model.save(fit_model.fit_model(result, report.analysis.table), Path(folder))
    line = [sys.executable, "-c", FRESH, str(BUDGET), *folders]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers, place = json.loads(done.stdout.splitlines()[-1])
    assert not place.startswith(str(fit_model.ROOT)) and len(answers) == len(results) >= 2
    for result, (losses, optima) in zip(results.values(), answers, strict=True):
        for i, (n, d) in enumerate([(1e9, 2e10), (2e9, 5e10)]):
            ends = result.forecast_interval(n, d, 6 * n * d)
            expected = [result.model.loss_at(n, d, 6 * n * d), ends.low, ends.high]
            assert [losses[name][i] for name in fit_model.LOSS_COLUMNS] == pytest.approx(expected, rel=1e-12)
        decision = result.decisions[0]
        assert optima["n_opt"] == pytest.approx([decision.n_opt], rel=1e-12)
        ends_of = [optima[name][0] for name in ("n_lo", "n_hi", "d_lo", "d_hi", "loss_opt_lo", "loss_opt_hi")]
        expected_ends = [
            e for i in (decision.n_interval, decision.d_interval, decision.loss_interval) for e in (i.low, i.high)
        ]
        assert ends_of == pytest.approx(expected_ends, rel=1e-12)


def test_what_cannot_be_answered_is_named(report: FitReport) -> None:
    model = fit_model.fit_model(report.best, report.analysis.table)
    with pytest.raises(FitError, match="give columns N and D, or budget; the table has N"):
        model.predict(pd.DataFrame({"N": [1e9]}))
    with pytest.raises(FitError, match="column D holds values that are not positive"):
        model.predict(pd.DataFrame({"N": [1e9], "D": [-1.0]}))
    without_rule = fit_model.FitModel(report.best, None)
    with pytest.raises(FitError, match="give a column C"):
        without_rule.predict(pd.DataFrame({"N": [1e9], "D": [2e10]}))
    both = without_rule.predict(pd.DataFrame({"N": [1e9], "D": [2e10], "C": [1.2e20], "budget": [BUDGET]}))
    assert list(both.columns) == [*fit_model.LOSS_COLUMNS, *fit_model.BUDGET_COLUMNS]


def test_stored_fits_are_numbers_only(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"fit\.a is a .*function, which is not stored as numbers"):
        store.write({"a": lambda: 0}, tmp_path)
    store.write({"a": (1, np.arange(3.0), None)}, tmp_path)
    first, array, nothing = store.read(tmp_path)["a"]
    assert first == 1 and nothing is None and array.tolist() == [0.0, 1.0, 2.0]
    (tmp_path / store.STRUCTURE).write_text(json.dumps({"dataclass": "os:system", "fields": {}}))
    with pytest.raises(FitError, match="names os:system, which is not part of"):
        store.read(tmp_path)
    with pytest.raises(FitError, match="holds no stored fit"):
        store.read(tmp_path / "nowhere")
