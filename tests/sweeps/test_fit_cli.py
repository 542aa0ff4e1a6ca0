"""sweeps.fit and sweeps.forecast as commands and functions, on CSV and on a real MLflow store."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lm.config import ModelConfig
from lm.plan import n_params, training_flops
from sweeps import fit, forecast, mlflow_fits, mlflow_runs
from sweeps.fit import fit_experiment
from sweeps.fit_report import FitReport, quantity
from sweeps.scaling.approaches import APPROACHES
from sweeps.scaling.table import FitError, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, mlflow_store, surface

LAW = surface(0.5, 24.0, 43.0, 0.24, 0.24)
BUDGETS = (1e11, 3e11, 1e12, 3e12)


def small_optimum(c: float) -> float:
    return (24 / 43) ** (1 / 0.48) * (c / 6) ** 0.5


def table(noise: float = 0.002) -> RunTable:
    return grid(LAW, BUDGETS, sizes=5, spread=2.5, noise=noise, seed=5, centre=small_optimum)


@pytest.fixture(scope="module")
def csv_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("csv") / "runs.csv"
    lines = ["run,N_params,D_tokens,C_flops,loss,C_budget"]
    lines += [f"{r.run},{r.n_params},{r.d_tokens},{r.c_flops},{r.loss},{r.budget}" for r in table().runs]
    path.write_text("\n".join([*lines, "dead,1000,1000000,1e11,nan,1e11"]) + "\n")
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same sweep as 20 cells of one MLflow parent."""
    uri = mlflow_store()
    client = mlflow_runs.client(uri)
    artifacts = tmp_path_factory.mktemp("artifacts").as_uri()
    identity = client.create_experiment("fits", artifacts, tags={"mlflow.note.content": "Written by hand."})
    parent = client.create_run(identity, tags={"scalewright.kind": "sweep"}).info.run_id
    for r in table().runs:
        mlflow_runs.log_run(
            "fits", r.run, {"scalewright.kind": "cell", "scalewright.cell_id": r.run},
            {
                "n_params": r.n_params, "d_tokens": r.d_tokens, "c_flops": r.c_flops, "budget_flops": r.budget,
                "flops_convention": "6N", "n_convention": "matmul",
            },
            {"val_loss": r.loss}, parent_run_id=parent, tracking_uri=uri,
        )  # fmt: skip
    return uri


@pytest.fixture(scope="module")
def report(store: str) -> FitReport:
    return fit_experiment("mlflow:fits", budgets=[1.2e13], bootstrap=100, mlflow_experiment="fits", tracking_uri=store)


def test_command_prints_the_table_and_writes_json(
    csv_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fit.json"
    plots = tmp_path / "plots"
    arguments = ["--runs", str(csv_file), "--budget", "1.2e13", "2e13", "--bootstrap", "50"]
    assert fit.main([*arguments, "--json", str(out), "--plots", str(plots)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "20 runs, 4 budgets from 1e+11 to 3e+12 FLOPs",
        "FLOPs counted as: column C_flops",
        "on this corpus at this scale",
        "dead: loss is NaN (diverged)",
        "verdict: ",
        "holdout error",
    ):
        assert expected in text
    numbers = json.loads(out.read_text())
    assert set(numbers["results"]) | set(numbers["refused"]) == set(APPROACHES)
    assert {"isoflop", "isoflop_akima", "parametric"} <= set(numbers["results"])
    assert set(numbers["results"]["isoflop"]["bias"]) == {"target", "a", "n_opt", "d_opt", "loss"}
    assert numbers["results"]["parametric"]["bias"] is None
    assert [d["budget"] for d in numbers["results"]["isoflop"]["decisions"]] == [1.2e13, 2e13]
    low, high = numbers["results"]["parametric"]["a_interval"]
    assert low < 0.5 < high
    assert numbers["excluded"] == [{"run": "dead", "reason": "loss is NaN (diverged)"}]
    assert {p.name for p in plots.iterdir()} == {"isoflop.png", "scaling.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in plots.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "missing.csv"], "no file missing.csv"),
        (["--runs", "CSV", "--mlflow"], "--mlflow needs --runs mlflow:EXPERIMENT"),
        (["--runs", "CSV", "--near", "2"], "--near is '2'; give a number of points from 3, or all"),
        (["--runs", "CSV", "--where", "N_params < 0"], "holds for none of the 21 rows"),
        (
            ["--runs", "CSV", "--where", "C_budget == 1e11", "--approach", "isoflop"],
            "isoflop needs minima at 2 budgets",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, csv_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit.main([str(csv_file) if a == "CSV" else a for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("module", [fit, forecast])
def test_help_has_examples(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    assert stop.value.code == 0
    told = capsys.readouterr().out
    assert "Examples:" in told and "(default 1000)" in told and "of starts and resampling (default 0)" in told
    assert "side by side (default all)" in told and "a CSV batch_tokens or" in told and "default None" not in told


def test_mlflow_and_csv_give_the_same_fit(report: FitReport, csv_file: Path) -> None:
    from_csv = fit_experiment(str(csv_file), budgets=[1.2e13], bootstrap=0)
    for name, result in report.analysis.results.items():
        assert result.a == pytest.approx(from_csv.analysis.results[name].a, rel=1e-4)
    assert report.analysis.table.convention == "6N"


def test_fit_runs_have_short_metrics_and_figures(report: FitReport, store: str) -> None:
    client = mlflow_runs.client(store)
    assert set(report.mlflow_run_ids) == set(report.analysis.results)
    for name, run_id in report.mlflow_run_ids.items():
        run = client.get_run(run_id)
        assert run.data.tags["scalewright.kind"] == "fit" and run.info.status == "FINISHED"
        assert run.data.params["approach"] == name and run.data.params["flops_convention"] == "6N"
        assert run.data.params["n_runs"] == "20"
        needed = "a a_lo a_hi b b_lo b_hi n_opt n_lo n_hi d_opt d_lo d_hi loss_pred loss_lo loss_hi holdout_err budget"
        assert set(needed.split()) <= set(run.data.metrics)
        assert run.data.metrics["a_lo"] < run.data.metrics["a"] < run.data.metrics["a_hi"]
        assert {a.path for a in client.list_artifacts(run_id)} >= {"fit.json", "isoflop.png", "scaling.png", "model"}


def test_the_address_of_the_fits_is_printed(report: FitReport, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    mode = "#/experiments/{}/runs?workflowType=machine_learning&viewStateShareKey="
    link = mode.format(mlflow_runs.client(store).get_experiment_by_name("fits").experiment_id)
    options = ["--approach", "isoflop", "--bootstrap", "0", "--budget", "1e13", "--mlflow", "--tracking-uri", store]
    assert fit.main(["--runs", "mlflow:fits", *options]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"http://localhost:5000/{link}" in last and f"mlflow ui --backend-store-uri {store}" in last


def test_experiment_is_tagged_for_the_ui_and_keeps_its_note(report: FitReport, store: str) -> None:
    tags = mlflow_runs.client(store).get_experiment_by_name("fits").tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    note = tags["mlflow.note.content"]
    assert note.startswith("Written by hand.") and "compare-runs" in note and "verdict" in note
    mlflow_fits.describe_fits("fits", ["x"], "second fit", store)
    again = mlflow_runs.client(store).get_experiment_by_name("fits").tags["mlflow.note.content"]
    assert again.startswith("Written by hand.") and again.count("## Last fit") == 1 and "second fit" in again


def shapes() -> list[ModelConfig]:
    return [ModelConfig(vocab_size=1024, d_model=w, n_layers=3, n_heads=w // 16) for w in (64, 96, 128, 160, 192)]


def test_forecast_is_made_at_the_planned_shape(report: FitReport) -> None:
    made = forecast.make_forecast(report, 1.2e13, shapes(), sequence_length=128, global_batch_tokens=1024)
    assert made.model in shapes() and made.n_params == n_params(made.model)
    assert made.flops_convention == "6N" and made.n_convention == "matmul"
    assert made.d_tokens % 1024 == 0
    assert made.c_flops == pytest.approx(training_flops(made.model, made.d_tokens, 128, "6N"))
    assert made.c_flops == pytest.approx(1.2e13, rel=0.01)
    ratios = [abs(math.log(n_params(s) / made.n_opt)) for s in shapes()]
    assert shapes()[ratios.index(min(ratios))] == made.model
    assert made.loss_lo < made.loss < made.loss_hi
    # N counts blocks and head, C the input table too, so the law at (N, D) is what the run will show.
    assert made.loss_lo < LAW(made.n_params, made.d_tokens) < made.loss_hi


def test_forecast_check_says_inside_or_outside(report: FitReport) -> None:
    made = forecast.make_forecast(report, 1.2e13)
    assert made.model is None and made.n_params == made.n_opt
    inside = forecast.check(made, made.loss * 1.001)
    assert inside.inside and inside.relative_error == pytest.approx(0.001)
    outside = forecast.check(made, made.loss_hi * 1.01)
    assert not outside.inside and "OUTSIDE" in outside.text


def test_forecast_is_written_down_then_scored(report: FitReport, store: str) -> None:
    made = forecast.log_forecast(forecast.make_forecast(report, 1.2e13), "fits", tracking_uri=store)
    client = mlflow_runs.client(store)
    run = client.get_run(made.mlflow_run_id)
    assert run.data.tags["scalewright.kind"] == "forecast"
    assert run.data.tags["scalewright.forecast_id"] == made.forecast_id
    assert run.data.metrics["loss_pred"] == pytest.approx(made.loss) and "inside" not in run.data.metrics
    outcome = forecast.log_outcome(made, made.loss * 1.002, "run7", store)
    run = client.get_run(made.mlflow_run_id)
    assert outcome.inside and run.data.metrics["inside"] == 1.0
    assert run.data.metrics["error"] == pytest.approx(0.002)
    assert run.data.tags["scalewright.training_run_id"] == "run7"


def test_forecast_refuses_what_it_cannot_know(report: FitReport) -> None:
    with pytest.raises(ValueError, match="need sequence_length"):
        forecast.make_forecast(report, 1e13, shapes())
    with pytest.raises(ValueError, match="budget must be positive"):
        forecast.make_forecast(report, -1.0)
    with pytest.raises(ValueError, match="no guess fit to forecast from: it was not fitted"):
        forecast.make_forecast(report, 1e13, approach="guess")
    far = forecast.make_forecast(report, 1e13, shapes()[:1], sequence_length=128)
    assert any("the nearest shape is" in flag for flag in far.flags)
    with pytest.raises(ValueError, match="call log_forecast before the run"):
        forecast.log_outcome(far, 3.0)


def test_forecast_command(csv_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape_file, out = tmp_path / "shapes.yaml", tmp_path / "forecast.json"
    shape_file.write_text(
        "- {vocab_size: 1024, d_model: 96, n_layers: 3, n_heads: 6}\n"
        "- {vocab_size: 1024, d_model: 128, n_layers: 3, n_heads: 8}\n"
    )
    arguments = ["--runs", str(csv_file), "--budget", "1.2e13", "--bootstrap", "50", "--shapes", str(shape_file)]
    assert forecast.main([*arguments, "--sequence-length", "128", "--json", str(out)]) == 0
    assert "95% interval" in capsys.readouterr().out
    assert json.loads(out.read_text())["model"]["vocab_size"] == 1024
    shape_file.write_text("- {vocab_size: 1024, width: 96}\n")
    assert forecast.main([*arguments, "--sequence-length", "128"]) == 2
    assert "a shape cannot be read" in capsys.readouterr().err


def test_nothing_usable_is_an_error() -> None:
    with pytest.raises(FitError, match="no usable runs in the table"):
        fit_experiment(RunTable.from_runs([]), bootstrap=0)


def test_quantities_read_as_spoken() -> None:
    assert [quantity(v) for v in (950, 143_000, 2.35e9, 1.61e13, math.nan)] == ["950", "143k", "2.35B", "16.1T", "-"]


def test_hoffmanns_surface_end_to_end() -> None:
    report = fit_experiment(grid(surface(*HOFFMANN), noise=0.003), budgets=[1e21], bootstrap=100)
    assert report.analysis.results["parametric"].a == pytest.approx(0.452, abs=0.03)
    assert report.analysis.results["isoflop"].a == pytest.approx(0.45, abs=0.05)
