"""IsoFLOP sweeps: what a cell is, what counts as done, and real Ray sweeps that are killed and resumed."""

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lm.data.files import exclusive
from lm.errors import ConfigError
from plugins.loggers import sweep_ledger
from plugins.loggers.sweep_ledger import SweepLedger, cell_tags, with_retries
from plugins.loggers.tracking import absolute_uri, patient_uri
from sweeps import isoflop, ray_session
from sweeps.config import parse_config
from sweeps.grid import Cell, Corpus, _set_values, build_grid, grid_id
from sweeps.resume import choose_parent, result_rows
from sweeps.settings import settings_of
from sweeps.specs import trial_spec
from sweeps.trial import outcome, run_cell
from tests.stores import new_store

ROOT = Path(__file__).parents[2]
# What two sweeps of one grid must agree on, to the last bit.
COMPARED = ("cell_id", "status", "budget_flops", "d_model", "n_params", "d_tokens", "c_flops", "val_loss")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> SweepLedger:
    return SweepLedger(new_store(tmp_path_factory.mktemp("mlflow")), "tiny")


@pytest.fixture(scope="module")
def cells(tiny_sweep: dict[str, Any]) -> list[Cell]:
    return build_grid(parse_config(tiny_sweep), isoflop.read_corpus(tiny_sweep["data"]["dir"]))


def child(ledger: SweepLedger, parent: str, cell: Cell, status: str) -> str:
    tags = {**cell_tags(cell.cell_id, cell.budget_flops), "mlflow.parentRunId": parent}
    run_id = ledger.client.create_run(ledger.experiment_id, tags=tags).info.run_id
    if status != sweep_ledger.RUNNING:
        assert ledger.close_cell(run_id, status)
    return run_id


def start(ledger: SweepLedger, config: Any, cells: list[Cell], statuses: list[str]) -> str:
    parent = ledger.create_sweep(config.name, grid_id(cells), {"sweep": config.name}, "note")
    for cell, status in zip(cells, statuses, strict=False):
        child(ledger, parent, cell, status)
    return parent


# -- which sweep a command means ---------------------------------------------------------------------------------------


def test_new_partial_finished(ledger: SweepLedger, tiny_sweep: dict[str, Any], cells: list[Cell]) -> None:
    config = parse_config({**tiny_sweep, "name": "choices"})
    choice = choose_parent(ledger, config, cells, resume=False)
    assert choice.run_id is None and choice.missing == cells

    parent = start(ledger, config, cells, ["complete", "diverged", "failed", "running"])
    with pytest.raises(ConfigError, match=r"2 of 6 cells done.*add --resume to run the others, or --name"):
        choose_parent(ledger, config, cells, resume=False)
    choice = choose_parent(ledger, config, cells, resume=True)
    assert choice.run_id == parent and choice.missing == cells[2:]  # failed and cut-off cells run again

    for cell in cells[2:]:
        child(ledger, parent, cell, "complete")
    for resume in (False, True):
        choice = choose_parent(ledger, config, cells, resume)
        assert choice.run_id == parent and not choice.missing and "reused" in choice.message
    rows = result_rows(ledger, parent, cells)
    assert sorted(row["status"] for row in rows) == ["complete"] * 5 + ["diverged"]


def test_a_grown_grid_goes_on_and_other_settings_start_anew(
    ledger: SweepLedger, tiny_sweep: dict[str, Any], cells: list[Cell]
) -> None:
    config = parse_config({**tiny_sweep, "name": "grown"})
    parent = start(ledger, config, cells[:3], ["complete"] * 3)
    choice = choose_parent(ledger, config, cells, resume=True)
    assert choice.run_id == parent and choice.missing == cells[3:]
    choice = choose_parent(ledger, config, cells[1:], resume=True)  # a finished cell is not wanted any more
    assert choice.run_id is None and "stays as it is" in choice.message


def test_a_sweep_that_still_runs_is_left_alone(
    ledger: SweepLedger, tiny_sweep: dict[str, Any], cells: list[Cell]
) -> None:
    config = parse_config({**tiny_sweep, "name": "alive"})
    parent = start(ledger, config, cells, ["complete"])
    with subprocess.Popen(["sleep", "60"]) as process:
        driver = {**sweep_ledger.this_driver(), "pid": process.pid, "started": sweep_ledger._started(process.pid)}
        ledger.claim(parent, grid_id(cells), driver)
        with pytest.raises(ConfigError, match=f"still being run by process {process.pid}"):
            choose_parent(ledger, config, cells, resume=True)
        process.kill()
    assert choose_parent(ledger, config, cells, resume=True).run_id == parent


def test_a_superseded_cell_stays_superseded(ledger: SweepLedger, cells: list[Cell]) -> None:
    parent = ledger.create_sweep("orphan", "grid", {}, "note")
    run_id = child(ledger, parent, cells[0], "running")
    assert ledger.supersede(ledger.cells(parent)) == 1
    assert not ledger.close_cell(run_id, "complete")  # an orphaned worker that finishes late
    assert [run.status for run in ledger.cells(parent)] == ["superseded"]
    assert ledger.client.get_run(run_id).info.status == "KILLED"


def test_died_cells_are_recorded(ledger: SweepLedger, cells: list[Cell]) -> None:
    parent = ledger.create_sweep("died", "grid", {}, "note")
    opened = child(ledger, parent, cells[0], "running")
    ledger.fail_cell(parent, cells[0].cell_id, "a", "out of memory")
    ledger.fail_cell(parent, cells[1].cell_id, "b", "node lost")
    runs = {run.cell_id: run for run in ledger.cells(parent)}
    assert runs[cells[0].cell_id].run_id == opened
    assert {run.status for run in runs.values()} == {"failed"}
    assert runs[cells[1].cell_id].tags["scalewright.error"] == "node lost"
    assert [row["status"] for row in result_rows(ledger, parent, cells)].count("missing") == 4


def test_busy_stores_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    calls: list[int] = []

    def locked() -> str:
        calls.append(1)
        if len(calls) < 4:
            raise MlflowException("(sqlite3.OperationalError) database is locked")
        return "done"

    assert with_retries(locked) == "done"

    def wrong() -> None:
        calls.append(1)
        raise MlflowException("no such thing", error_code=INVALID_PARAMETER_VALUE)

    calls.clear()
    with pytest.raises(MlflowException):
        with_retries(wrong)
    assert len(calls) == 1


def test_uris(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("sqlite:///a/mlflow.db") == f"sqlite:///{tmp_path}/a/mlflow.db"
    assert absolute_uri("sqlite:////a/mlflow.db") == "sqlite:////a/mlflow.db"
    assert patient_uri("sqlite:////a.db") == "sqlite:////a.db?timeout=60"
    assert patient_uri("http://host:5000") == absolute_uri("http://host:5000") == "http://host:5000"


# -- one cell ----------------------------------------------------------------------------------------------------------


def test_outcome() -> None:
    whole, cut = SimpleNamespace(global_step=9, max_steps=9), SimpleNamespace(global_step=5, max_steps=9)
    assert outcome({"val_loss": 3.0}, whole, 300) == ("complete", 3.0)
    assert outcome({"val_loss": 5.8}, whole, 300)[0] == "diverged"  # ln 300 = 5.70
    assert outcome({"val_loss": math.nan}, whole, 300)[0] == "diverged"
    assert outcome({}, whole, 300)[0] == "diverged"
    assert outcome({"val_loss": 3.0}, cut, 300)[0] == "diverged"


def test_cells_that_diverge_or_crash_are_rows(
    ledger: SweepLedger, tiny_sweep: dict[str, Any], cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger.uri)
    config = parse_config({**tiny_sweep, "name": "bad"})
    parent = start(ledger, config, cells, [])
    wild = trial_spec(cells[0], config, ledger.uri, parent)
    wild["recipe"]["model"]["optim"]["lr"] = 1e6
    result = run_cell(wild)
    assert result["status"] == "diverged", result
    broken = trial_spec(cells[1], config, ledger.uri, parent)
    broken["recipe"]["data"]["dir"] = "/nowhere"
    result = run_cell(broken)
    assert result["status"] == "failed" and "/nowhere" in result["error"]
    misspelt = trial_spec(cells[2], config, ledger.uri, parent)
    misspelt["recipe"]["model"]["optim"]["momentum"] = 0.9
    result = run_cell(misspelt)
    assert result["status"] == "failed" and "momentum" in result["error"]
    statuses = {row["cell_id"]: row["status"] for row in result_rows(ledger, parent, cells)}
    assert [statuses[cell.cell_id] for cell in cells[:4]] == ["diverged", "failed", "failed", "missing"]


# -- whole sweeps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, tiny_sweep: dict[str, Any]) -> Path:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tiny_sweep))
    new_store(tmp_path)
    return tmp_path


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "sweeps.isoflop", "--config", str(folder / "sweep.yaml"), *arguments]


def environment() -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    return {**environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=500
    )


def lines_until(folder: Path, log: Path, text: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a sweep as its own process group; yields it once `text` was printed."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(folder, *arguments), cwd=folder, env=environment(), stdout=out, stderr=out, start_new_session=True
        )
    give_up = time.monotonic() + 400
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < give_up, log.read_text()
        time.sleep(0.05)
    yield process


def table(folder: Path, tiny_sweep: dict[str, Any], cells: list[Cell]) -> list[dict[str, Any]]:
    ledger = SweepLedger(f"sqlite:///{folder / 'mlflow.db'}", "tiny")
    (parent,) = ledger.sweeps("tiny")
    return [{key: row[key] for key in COMPARED} for row in result_rows(ledger, parent.run_id, cells)]


def ray_processes(session: str) -> list[Path]:
    return [folder for folder in Path("/proc").glob("[0-9]*") if ray_session._belongs(folder, session)]


@pytest.mark.timeout(900)
def test_killed_and_resumed_gives_the_table_of_an_uninterrupted_sweep(
    workplace: Path,
    tiny_sweep: dict[str, Any],
    ledger: SweepLedger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three cells on one core: at the kill one is done, one half done, one not begun. Ray starts twice, which is what
    the test's time goes into; commands that start no trial run in this process."""
    tiny_sweep = {**tiny_sweep, "budgets": {4e8: [16, 24], 8e8: [16]}}
    (workplace / "sweep.yaml").write_text(yaml.safe_dump(tiny_sweep))
    cells = build_grid(parse_config(tiny_sweep), isoflop.read_corpus(tiny_sweep["data"]["dir"]))
    (process,) = lines_until(workplace, workplace / "log", "[1/3]", "--cores", "1")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    monkeypatch.chdir(workplace)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    here = ["--config", str(workplace / "sweep.yaml")]
    assert isoflop.main(here) == 2
    refused = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(refused) == 1 and "add --resume" in refused[0]

    resumed = run(workplace, "--resume", "--cores", "1", "--json", "result.json")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "utilisation" in resumed.stdout and "[3/3]" in resumed.stdout
    assert isoflop.main(here) == 0 and "reused" in capsys.readouterr().out

    store = SweepLedger(f"sqlite:///{workplace / 'mlflow.db'}", "tiny")
    (parent,) = store.sweeps("tiny")  # one parent through it all
    assert parent.status == "complete"
    runs = store.cells(parent.run_id)
    assert sorted(r.cell_id for r in runs if r.status == "complete") == sorted(cell.cell_id for cell in cells)
    assert all(r.status in ("complete", "superseded") for r in runs)
    assert not ray_processes(parent.driver["session"])

    # The uninterrupted table, made without Ray: a trial is the recipe, so it must agree to the last bit.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger.uri)
    config = parse_config({**tiny_sweep, "name": "reference"})
    reference = start(ledger, config, cells, [])
    for cell in cells:
        run_cell(trial_spec(cell, config, ledger.uri, reference))
    expected = [{key: row[key] for key in COMPARED} for row in result_rows(ledger, reference, cells)]
    assert table(workplace, tiny_sweep, cells) == expected
    assert all(row["status"] == "complete" and row["val_loss"] < math.log(300) for row in expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("how", "send"), [(signal.SIGINT, os.kill), (signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg)]
)
def test_interrupt_ends_cleanly(workplace: Path, how: signal.Signals, send: Any) -> None:
    """The last one as batch systems and `timeout` do it: to the whole group, Ray's processes included."""
    (process,) = lines_until(workplace, workplace / "log", "[1/6]")
    send(process.pid, how)
    assert process.wait(timeout=60) == 130
    assert "--resume runs the others" in (workplace / "log").read_text()
    store = SweepLedger(f"sqlite:///{workplace / 'mlflow.db'}", "tiny")
    (parent,) = store.sweeps("tiny")
    assert parent.status == "interrupted"
    assert all(run.status in ("complete", "superseded") for run in store.cells(parent.run_id))
    assert not ray_processes(parent.driver["session"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trial_whose_process_is_killed_runs_again(
    workplace: Path, tiny_sweep: dict[str, Any], cells: list[Cell]
) -> None:
    (process,) = lines_until(workplace, workplace / "log", "[1/6]")
    store = SweepLedger(f"sqlite:///{workplace / 'mlflow.db'}", "tiny")
    session = store.sweeps("tiny")[0].driver["session"]
    workers = [folder for folder in ray_processes(session) if b"Trainable" in (folder / "cmdline").read_bytes()]
    assert workers
    os.kill(int(workers[0].name), signal.SIGKILL)
    assert process.wait(timeout=500) == 0, (workplace / "log").read_text()
    assert [row["status"] for row in table(workplace, tiny_sweep, cells)] == ["complete"] * 6


def test_end_orphans_takes_only_its_own_session(tmp_path: Path) -> None:
    session = "session_2000-01-01_00-00-00_000000_1"
    sleep = "import time; time.sleep(60)"
    arguments = {
        "own": [sys.executable, "-c", sleep, f"/tmp/ray/{session}/logs"],
        "other": [sys.executable, "-c", sleep, "/tmp/ray/session_2000-01-01_00-00-00_000000_12/logs"],
    }
    started = {name: subprocess.Popen(words) for name, words in arguments.items()}
    try:
        time.sleep(0.2)
        assert ray_session.end_orphans("") == 0
        assert ray_session.end_orphans(session) == 1
        assert started["own"].wait(timeout=10) == -signal.SIGKILL
        assert started["other"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.wait()


# -- command line ------------------------------------------------------------------------------------------------------


def test_a_second_driver_is_refused_at_once(workplace: Path, tiny_sweep: dict[str, Any]) -> None:
    uri = f"sqlite:///{workplace / 'mlflow.db'}"
    with exclusive(isoflop._lock_file(uri, parse_config(tiny_sweep)), "busy"):
        second = run(workplace)
    assert second.returncode == 2
    assert second.stderr.strip().startswith("error: another command runs sweep tiny: wait for it")


def test_an_earlier_sweep_with_other_settings_is_told_apart(
    ledger: SweepLedger, tiny_sweep: dict[str, Any], cells: list[Cell]
) -> None:
    config = parse_config({**tiny_sweep, "name": "told"})
    corpus = Corpus(300, {"prose": 1}, {"shards": "a" * 64, "tokenizer": "b" * 64})
    parent = start(ledger, config, cells, [sweep_ledger.COMPLETE])
    ledger.describe(parent, settings_of(config, corpus))
    other = parse_config({**tiny_sweep, "name": "told", "optim": {**tiny_sweep["optim"], "lr": 0.5}})
    moved = dataclasses.replace(corpus, fingerprint={"shards": "c" * 64, "tokenizer": "b" * 64})
    renamed = [dataclasses.replace(cell, cell_id=f"{i:012d}") for i, cell in enumerate(cells)]
    message = choose_parent(ledger, other, renamed, True, settings_of(other, moved)).message
    assert "corpus.shards was aaaaaaaaaaaaaaaa, is cccccccccccccccc" in message
    assert f"optim.lr was {tiny_sweep['optim']['lr']}, is 0.5" in message


def test_a_new_field_of_the_model_changes_no_cell(cells: list[Cell]) -> None:
    model = cells[0].model
    assert "qk_norm" not in _set_values(model)
    assert _set_values(dataclasses.replace(model, qk_norm=True))["qk_norm"] is True


def test_dry_run_and_errors_need_neither_ray_nor_mlflow(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isoflop.main(["--config", str(workplace / "sweep.yaml"), "--dry-run"]) == 0
    assert "6 cells" in capsys.readouterr().out
    assert isoflop.main(["--config", str(workplace / "none.yaml")]) == 2
    text = (workplace / "sweep.yaml").read_text()
    (workplace / "sweep.yaml").write_text(text.replace("out", "nowhere"))
    assert isoflop.main(["--config", str(workplace / "sweep.yaml")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(line.startswith("error: ") for line in errors)
    assert "recipes.data prepare" in errors[1]


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        isoflop.main(["--help"])
    out = capsys.readouterr().out
    assert "Examples:" in out and "--resume" in out
