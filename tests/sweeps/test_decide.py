"""From a finished sweep to a forecast, a config that trains, and the verdict. Losses are of a known surface."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow.entities import Metric, Param, RunTag

from lm.data.synthetic import random_documents, write_folder
from lm.errors import ConfigError
from lm.plan import DEFAULT_FLOP_CONVENTION
from plugins.loggers.sweep_ledger import COMPLETE, SweepLedger, cell_tags
from sweeps.config import load_config
from sweeps.decide import decide, main
from sweeps.grid import Cell, build_grid, grid_id
from sweeps.isoflop import read_corpus
from sweeps.planned import candidate_shapes, plan_run
from sweeps.report import report
from tests.stores import new_store
from tests.sweeps.scaling_helpers import surface

ROOT = Path(__file__).resolve().parents[2]
LAW = surface(1.0, 60.0, 60.0, 0.34, 0.34)
BUDGET = 4e9


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus, and a finished sweep on it in an MLflow store of its own."""
    place = tmp_path_factory.mktemp("decide")
    documents = {"train": random_documents(60_000, 300, 60, 0), "validation": random_documents(4_000, 300, 60, 1)}
    write_folder(place / "data", {"prose": documents}, vocab_size=300)
    config = {
        "name": "known",
        "experiment": "known",
        "budgets": {2.5e8: [8, 16, 24, 32, 40], 5e8: [8, 16, 24, 32, 40], 1e9: [8, 16, 24, 32, 40, 48]},
        "data": {"dir": str(place / "data"), "sequence_length": 32, "validation_windows": 20},
        "model": {"n_layers": 1, "zero_init_head": True, "init_std": 0.1, "mup": {"base_width": 16, "base_d_head": 8}},
        "d_head": 8,
        "optim": {"lr": 8e-3, "schedule": {"kind": "cosine", "floor": 0.0}},
        "batch": {"sequences": 3, "at_tokens": 1e4, "exponent": 0.0},
        "min_steps": 5,
        "tolerance": 0.2,
    }
    (place / "sweep.yaml").write_text(yaml.safe_dump(config))
    new_store(place)
    return place


@pytest.fixture(autouse=True)
def store(place: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite:///{place}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(place)
    return uri


def record(ledger: SweepLedger, parent: str, cell: Cell) -> None:
    params = {
        "n_params": cell.n_params,
        "d_tokens": cell.tokens,
        "c_flops": cell.flops,
        "budget_flops": cell.budget_flops,
        "flops_convention": DEFAULT_FLOP_CONVENTION,
        "n_convention": "matmul",
    }
    tags = {**cell_tags(cell.cell_id, cell.budget_flops), "mlflow.parentRunId": parent}
    run_id = ledger.client.create_run(ledger.experiment_id, tags=tags, run_name=cell.label).info.run_id
    ledger.client.log_batch(
        run_id,
        metrics=[Metric("val_loss", LAW(cell.n_params, cell.tokens), 0, cell.steps)],
        params=[Param(key, str(value)) for key, value in params.items()],
        tags=[RunTag("team", "test")],
    )
    ledger.close_cell(run_id, COMPLETE)


@pytest.fixture(scope="module")
def finished(place: Path) -> str:
    config = load_config(place / "sweep.yaml")
    cells = build_grid(config, read_corpus(config.data.dir))
    ledger = SweepLedger(f"sqlite:///{place}/mlflow.db", config.experiment)
    parent = ledger.create_sweep(config.name, grid_id(cells), {}, "")
    for cell in cells:
        record(ledger, parent, cell)
    ledger.finish_sweep(parent, COMPLETE, {})
    return parent


def test_an_unfinished_sweep_decides_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(place / "sweep.yaml"), "--budget", "4e9", "--out", str(place / "early")]
    assert main(arguments) == 2
    assert "cells to run" in capsys.readouterr().err
    assert not (place / "early").exists()


def test_the_planned_run_keeps_the_rules_of_the_sweep(place: Path) -> None:
    config = load_config(place / "sweep.yaml")
    corpus = read_corpus(config.data.dir)
    cell = plan_run(config, corpus, n_opt=30_000, budget=BUDGET, processes=2)
    assert cell.sequences % 2 == 0
    assert abs(cell.deviation) < 0.01
    assert cell.model.mup == config_mup(config)
    sizes = [abs(shape.d_model - cell.model.d_model) for shape in candidate_shapes(config, corpus.vocab_size, 30_000)]
    assert min(sizes) == 0
    assert cell.n_params == pytest.approx(30_000, rel=0.3)


def config_mup(config):
    from lm.config import MuPConfig

    return MuPConfig(**config.model["mup"])


def test_decide_train_report(place: Path, finished: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The config it writes trains; the verdict is reported although random text misses the surface by far."""
    out = place / "decision"
    decision = decide(place / "sweep.yaml", BUDGET, 2, out)
    names = sorted(path.name for path in out.iterdir())
    assert names == ["fit.json", "forecast.json", "isoflop.png", "run.yaml", "scaling.png"]
    assert decision["loss_lo"] < decision["loss"] < decision["loss_hi"]
    truth = LAW(decision["n_params"], decision["d_tokens"])
    assert decision["loss_lo"] <= truth <= decision["loss_hi"]

    again = decide(place / "sweep.yaml", BUDGET, 2, out)
    assert again == json.loads((out / "forecast.json").read_text())  # the first forecast stands
    with pytest.raises(ConfigError, match="no run yet"):
        report(out, place / "runs")

    run = yaml.safe_load((out / "run.yaml").read_text())
    assert run["trainer"]["strategy"] == "fsdp" and run["trainer"]["devices"] == 2
    line = [sys.executable, "-m", "recipes.pretrain", "fit", "--config", str(out / "run.yaml"), "--tokens", "2e3"]
    done = subprocess.run([*line, "--runs_dir", str(place / "runs")], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    outcome, metrics = report(out, place / "runs")
    assert outcome.inside is False and metrics["val_loss"] == outcome.measured
    html = (out / "report.html").read_text()
    assert 'class="outside">outside the interval' in html and "http" not in html
    assert html.count("<svg ") >= 7 and "Forecasts</h2>" in html and decision["forecast_id"] in html
    ledger = SweepLedger(f"sqlite:///{place}/mlflow.db", "known")
    logged = ledger.client.get_run(decision["mlflow_run_id"]).data
    assert logged.metrics["inside"] == 0 and logged.metrics["loss"] == pytest.approx(outcome.measured)
    trained = ledger.client.get_run(logged.tags["scalewright.training_run_id"])
    assert trained.data.tags["scalewright.forecast_id"] == decision["forecast_id"]
    assert trained.info.start_time >= ledger.client.get_run(decision["mlflow_run_id"]).info.start_time
