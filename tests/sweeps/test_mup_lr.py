"""Learning-rate sweeps: settings, what a cell is, early stopping, and a real Ray sweep that goes on from a part."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.tune.schedulers import TrialScheduler

from lm.errors import ConfigError
from plugins.loggers.sweep_ledger import SweepLedger
from sweeps import mup_lr
from sweeps.config import parse_config
from sweeps.early_stop import CurveASHA
from sweeps.grid import Corpus, grid_id
from sweeps.isoflop import read_corpus
from sweeps.lr_grid import EarlyStop, LrCell, build_lr_grid, load_lr_sweep, make_lr_cell, parse_lr_sweep
from sweeps.lr_replay import replay
from sweeps.records import read_runs
from sweeps.settings import settings_of
from sweeps.specs import trial_spec
from sweeps.trial import run_cell
from tests.sweeps.scaling_helpers import mlflow_store

ROOT = Path(__file__).parents[2]
CORPUS = Corpus(300, {"prose": 1_000_000}, {"shards": "a" * 64})


@pytest.fixture(scope="session")
def tiny(tiny_corpus: Path) -> dict[str, Any]:
    """Eight cells, a second or less each."""
    return {
        "name": "tiny-lr",
        "experiment": "tiny-lr",
        "widths": [8, 16],
        "parametrisations": ["mup"],
        "lr": [1e-5, 4e-3, 1.6e-2, 6.4e-2],
        "tokens": 2560,
        "sequences": [2],
        "early_stop": {"every": 5, "grace": 20, "reduction": 2, "keep": 3},
        "data": {"dir": str(tiny_corpus), "sequence_length": 32, "validation_windows": 8},
        "model": {
            "n_layers": 1,
            "zero_init_head": True,
            "init_std": 0.1,
            "embedding_init_std": 0.5,
            "mup": {"base_width": 8, "base_d_head": 8},
        },
        "d_head": 8,
        "optim": {"eps": 1e-10, "schedule": {"kind": "cosine", "floor": 0.0}},
        "warmup": {"min_steps": 5},
        "min_steps": 10,
    }


# -- settings and cells ------------------------------------------------------------------------------------------------


def test_the_grid_is_every_rate_of_every_curve(tiny: dict[str, Any]) -> None:
    sweep = parse_lr_sweep(
        {**tiny, "parametrisations": ["mup", "standard"], "seeds": [0, 1], "sequences": [2, 4],
         "lr": {"low": "1e-3", "high": 8e-3}}
    )  # fmt: skip
    assert sweep.lrs == pytest.approx((1e-3, 2e-3, 4e-3, 8e-3)) and sweep.grid_step == pytest.approx(2)
    cells = build_lr_grid(sweep, CORPUS)
    # The base width, 8, is one run under both and runs once.
    assert len({cell.cell_id for cell in cells}) == len(cells) == (2 + 1) * 2 * 2 * 4
    assert {cell.tokens for cell in cells} == {2560} and {cell.steps for cell in cells} == {40, 20}
    assert [cell.model.d_model for cell in cells] == [16] * 32 + [8] * 16  # the longest first
    curve = [cell.lr for cell in cells if cell.group == "mup-d16-b2" and cell.seed == 0]
    assert curve[0] == pytest.approx(4e-3) and curve[-1] == pytest.approx(1e-3)  # the middle of the rates first


def test_standard_differs_in_rates_and_logits_only(tiny: dict[str, Any]) -> None:
    from lm.init import init_std

    sweep = parse_lr_sweep(tiny)
    for width in (8, 16, 64):
        mup, standard = (make_lr_cell(sweep, CORPUS, param, width, 2, 1e-2, 0).model for param in ("mup", "standard"))
        assert mup.width_multiplier == width / 8 and standard.width_multiplier == 1 and standard.mup is None
        for name in ("embedding.weight", "blocks.0.attention.wq.weight", "blocks.0.mlp.w_down.weight"):
            assert init_std(name, standard) == pytest.approx(init_std(name, mup))


def test_at_the_base_width_both_are_one_run(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store())
    ledger = SweepLedger(mlflow_store(), "both")
    sweep = parse_lr_sweep({**tiny, "experiment": "both", "early_stop": None})
    corpus = read_corpus(sweep.common.data.dir)
    parent = ledger.create_sweep("both", "grid", {}, "note")
    losses = {}
    for param, width in (("mup", 8), ("standard", 8), ("mup", 16), ("standard", 16)):
        cell = make_lr_cell(sweep, corpus, param, width, 2, 1.6e-2, 0)
        losses[param, width] = run_cell(trial_spec(cell, sweep.common, ledger.uri, parent))["val_loss"]
    assert losses["mup", 8] == losses["standard", 8]
    assert losses["mup", 16] != losses["standard", 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budgets": {1e9: [8]}}, "budgets is a setting of sweeps.isoflop; .* takes widths and tokens"),
        ({"batch": {"sequences": 4}}, "takes sequences"),
        ({"lr": {"low": 1e-3}}, "lr must be a list of rates, or low, high and step"),
        ({"lr": {"low": 1e-2, "high": 1e-3}}, "low must be positive, high above it"),
        ({"lr": [1e-3, "fast"]}, "lr must be a number, got 'fast'"),
        ({"lr": [0.0, 1e-3]}, "learning rates must be positive"),
        ({"widths": [8, 8]}, "widths must be a list of different values"),
        ({"widths": [8.5]}, "widths must be a whole number, got 8.5"),
        ({"parametrisations": ["ntk"]}, "'ntk' is neither mup nor standard"),
        ({"model": {"n_layers": 1}}, "model.mup must say the base width"),
        ({"early_stop": {"keep": 2}}, "keep must be at least 3"),
        ({"early_stop": {"patience": 2}}, "unknown setting early_stop.patience"),
        ({"early_stop": {"every": 10, "grace": 5}}, "grace at least every"),
        ({"resources": {"processes": 2}}, "early_stop ends trials of one process"),
        ({"widht": [8]}, "unknown setting widht"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_clear_line(tiny: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_lr_sweep({**tiny, **change})


def test_short_runs_are_refused(tiny: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="4 steps of 2 sequences, min_steps is 10: raise tokens"):
        build_lr_grid(parse_lr_sweep({**tiny, "tokens": 256}), CORPUS)


# -- early stopping ----------------------------------------------------------------------------------------------------


def test_isoflop_cells_are_never_stopped_early(tiny_sweep: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="an IsoFLOP cell is never stopped early"):
        parse_config({**tiny_sweep, "early_stop": {"every": 5}})


def test_asha_compares_inside_a_curve_and_keeps_neighbours() -> None:
    scheduler = CurveASHA(EarlyStop(every=5, grace=10, reduction=2, keep=3), max_steps=40)
    controller: Any = None

    def report(curve: str, name: str, loss: float, step: int = 10) -> str:
        trial = SimpleNamespace(trial_id=f"{curve}-{name}", config={"spec": {"curve": curve}})
        if step == 10:
            scheduler.on_trial_add(controller, trial)
        return scheduler.on_trial_result(controller, trial, {"step": step, "loss": loss})

    for name, loss in [("a", 2.0), ("b", 1.9), ("c", 1.8)]:  # a wide model's curve, all far below the narrow one's
        assert report("wide", name, loss) == TrialScheduler.CONTINUE
    assert report("narrow", "best", 5.0) == TrialScheduler.CONTINUE
    assert report("narrow", "second", 5.1) == TrialScheduler.CONTINUE  # plain ASHA would end it
    assert report("narrow", "third", 5.2) == TrialScheduler.CONTINUE
    assert report("narrow", "fourth", 5.3) == TrialScheduler.STOP
    assert report("narrow", "new best", 4.9) == TrialScheduler.CONTINUE
    assert report("narrow", "fifth", 5.25) == TrialScheduler.STOP
    assert report("narrow", "best", 4.0, step=15) == TrialScheduler.CONTINUE  # between rungs nobody is stopped
    assert report("narrow", "third", 4.5, step=15) == TrialScheduler.CONTINUE
    assert scheduler.on_trial_result(
        controller,
        SimpleNamespace(trial_id="narrow-best", config={"spec": {"curve": "narrow"}}),
        {"status": "complete"},  # the end of a run brings no loss to compare
    ) == TrialScheduler.CONTINUE  # fmt: skip


def test_a_replay_says_what_would_have_been_saved(tiny: dict[str, Any]) -> None:
    cells = build_lr_grid(parse_lr_sweep({**tiny, "widths": [16], "lr": {"low": 1e-3, "high": 6.4e-2}}), CORPUS)
    assert len(cells) == 7
    best = 8e-3
    losses = {cell.cell_id: [(s, 5 + abs(math.log(cell.lr / best))) for s in range(1, 41)] for cell in cells}
    found = replay(cells, losses, EarlyStop(every=5, grace=20, reduction=2, keep=3))
    # From the middle outwards: 8, 4 and 16 e-3 are kept, each of the other four has three better ones at step 20.
    kept = sorted(cell.lr for cell in cells if cell.cell_id not in found.stopped_at)
    assert kept == pytest.approx([4e-3, 8e-3, 1.6e-2])
    assert set(found.stopped_at.values()) == {20} and found.steps == found.flops == pytest.approx(4 / 7 / 2)


# -- a whole sweep -----------------------------------------------------------------------------------------------------


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "sweeps.mup_lr", "--config", str(folder / "sweep.yaml"), *arguments]
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=500)


@pytest.mark.timeout(900)
def test_a_sweep_goes_on_stops_losers_and_finds_the_optimum(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tiny))
    sweep = load_lr_sweep(tmp_path / "sweep.yaml")
    corpus = read_corpus(sweep.common.data.dir)
    cells = build_lr_grid(sweep, corpus)
    uri = mlflow_store()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    ledger = SweepLedger(uri, "tiny-lr")

    # A sweep whose driver is gone after one cell, which ran in this thread and cannot be stopped early.
    parent = ledger.create_sweep("tiny-lr", grid_id(cells), {"sweep": "tiny-lr"}, "note")
    ledger.describe(parent, settings_of(sweep.common, corpus))
    first = next(cell for cell in cells if cell.group == "mup-d8-b2" and cell.lr == 4e-3)
    assert run_cell(trial_spec(first, sweep.common, uri, parent))["status"] == "complete"
    assert mup_lr.main(["--config", "sweep.yaml"]) == 2
    refused = capsys.readouterr().err
    assert "1 of 8 cells done" in refused and "add --resume" in refused

    resumed = command(tmp_path, "--resume", "--cores", "1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "[8/8]" in resumed.stdout and "utilisation" in resumed.stdout
    assert mup_lr.main(["--config", "sweep.yaml"]) == 0  # fits again, runs nothing
    assert "all 8 cells are in MLflow already" in capsys.readouterr().out

    runs = {run.cell_id: run for run in ledger.cells(parent)}
    assert len(runs) == len(ledger.cells(parent)) == 8  # the finished cell did not run again
    status = {(cell.model.d_model, cell.lr): runs[cell.cell_id].status for cell in cells}
    # At width 16 three better rates had reported; at width 8 the third of them ran before this driver.
    assert status.pop((16, 1e-5)) == "stopped" and set(status.values()) == {"complete"}
    stopped = next(run for run in runs.values() if run.status == "stopped")
    assert stopped.tags["scalewright.error"].startswith("stopped early at step 20 of 40")
    assert stopped.metrics["stopped_step"] == 20
    assert ledger.client.get_run(stopped.run_id).info.status == "FINISHED" and "val_loss" not in stopped.metrics

    # Reported on the way or not, in a thread or not: one loss.
    plain = make_lr_cell(dataclasses.replace(sweep, early_stop=None), corpus, "mup", 16, 2, 1.6e-2, 0)
    other = ledger.create_sweep("plain", "grid", {}, "note")
    alone = run_cell(trial_spec(plain, sweep.common, uri, other))["val_loss"]
    assert alone == runs[plain.cell_id].metrics["val_loss"] < math.log(300)

    table = read_runs("mlflow:tiny-lr", tracking_uri=uri, parent_run_id=parent)
    assert len(table) == 7 and [row.reason for row in table.excluded] == ["cell is stopped"]
    cell = runs[first.cell_id]
    assert cell.params["param"] == "mup" and cell.params["batch_tokens"] == "64" and cell.params["lr"] == "0.004"
    assert "not used: mup-d16-64tokens-lr1.0e-05-s0: run is stopped" in resumed.stdout
    assert (tmp_path / "runs/tiny-lr/mup_lr.png").is_file() and (tmp_path / "runs/tiny-lr/mup_lr.json").is_file()


# -- command line ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mup_lr"])
def test_examples_plan(name: str, tiny_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = yaml.safe_load((ROOT / "conf/sweep" / f"{name}.yaml").read_text())
    raw["data"]["dir"] = str(tiny_corpus)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(raw))
    assert mup_lr.main(["--config", str(tmp_path / "sweep.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "35 cells" in out and "standard-d64" not in out and "standard-d256-b4" in out


def test_errors_need_neither_ray_nor_mlflow(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mup_lr.main(["--config", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert mup_lr.main(["--config", str(tmp_path / "list.yaml")]) == 2
    (tmp_path / "gone.yaml").write_text(yaml.safe_dump({**tiny, "data": {"dir": "/nowhere"}}))
    assert mup_lr.main(["--config", str(tmp_path / "gone.yaml"), "--dry-run"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)
    with pytest.raises(SystemExit, match="0"):
        mup_lr.main(["--help"])
    assert "Examples:" in capsys.readouterr().out


def test_labels_name_the_curve(tiny: dict[str, Any]) -> None:
    cell = make_lr_cell(parse_lr_sweep(tiny), CORPUS, "standard", 16, 2, 4e-3, 1)
    assert isinstance(cell, LrCell) and cell.label == "standard-d16-b2-lr4.0e-03-s1" and cell.deviation == 0
