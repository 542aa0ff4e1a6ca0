"""The MLflow logger against a real SQLite store: restarts, roll-backs, absent servers, torn journals."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm.errors import ConfigError
from plugins.loggers.history import curve, latest
from plugins.loggers.journal import FILE, Journal
from plugins.loggers.mlflow import MLflowLogger
from recipes import mlflow_sync
from tests.plugins import slow_steps
from tests.stores import new_store

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    slow_steps.preload()
    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def client(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    return MlflowClient(tracking_uri=store)


def steps(client: Any, run_id: str | None, key: str) -> list[int]:
    return [metric.step for metric in client.get_metric_history(run_id, key)]


OPEN = """
import os, signal, time
from plugins.loggers.mlflow import MLflowLogger
logger = MLflowLogger(experiment="e", tags={"team": "a"}, flush_seconds=0.1)
logger.open(run_dir)
"""


def test_one_run_across_restarts_and_no_row_twice(client: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    code = """
logger.log_params({"lr": 0.1, "d_model": 64})
for step in (10, 20, 30):
    logger.log_metrics({"loss": 1 / step}, step=step)
logger.flush()
logger._sender.stop()
logger.log_metrics({"loss": 1 / 40}, step=40)  # written down, not sent
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = slow_steps.start_code(OPEN + code, run_dir)
    process.join(timeout=240)
    assert process.exitcode == -signal.SIGKILL  # the newest checkpoint is step 20
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    assert client.get_run(run_id).info.status == "RUNNING"
    assert steps(client, run_id, "loss") == [10, 20, 30]
    with (run_dir / FILE).open("a") as file:
        file.write('{"step": 50, "time": 17')  # and the crash tore a line

    second = MLflowLogger(experiment="e")
    second.open(run_dir, resume=True)
    second.log_params({"lr": 0.2, "d_model": 64})
    for step in (30, 40, 50):
        second.log_metrics({"loss": 1 / step, "grad_norm": 1.0}, step=step)
    second.finalize("success")

    assert second.run_id == run_id
    assert steps(client, run_id, "loss") == [10, 20, 30, 40, 50]
    assert steps(client, run_id, "grad_norm") == [30, 40, 50]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.1" and run.data.tags["resumed.lr"] == "0.2"
    assert run.data.tags["team"] == "a" and run.info.run_name == "one"

    # How far sending got was written down too early or not at all: every row is asked for, none is doubled.
    (run_dir / ".mlflow_sent.json").unlink()
    assert mlflow_sync.main([str(run_dir)]) == 0
    assert steps(client, run_id, "loss") == [10, 20, 30, 40, 50]


def test_roll_backs_and_other_branches(client: Any, tmp_path: Path) -> None:
    """The last branch counts, in-process and after a restart with another config; the rest stays visible."""
    logger = MLflowLogger(experiment="e")
    logger.open(tmp_path / "run")
    for step in (10, 20, 30, 40):
        logger.log_metrics({"tokens": float(step)}, step=step)
        logger.log_metrics({"loss": step + 0.5}, step=step)
    logger.rewind(20)
    logger.log_metrics({"loss": 3.0, "tokens": 30.0}, step=30)  # says as much as before, and counts again
    logger.finalize("failed")
    assert curve(client, str(logger.run_id), "loss") == {10: 10.5, 20: 20.5, 30: 3.0}  # 40 is abandoned
    assert len(steps(client, logger.run_id, "loss")) == 5
    run = client.get_run(logger.run_id)
    assert run.info.status == "FAILED"
    assert run.data.metrics["loss"] == 40.5 and latest(client, run)["loss"] == 3.0

    again = MLflowLogger(experiment="e")
    again.open(tmp_path / "run", resume=True)
    again.log_metrics({"tokens": 20.0}, step=20)
    again.log_metrics({"loss": 20.5 * (1 + 1e-6)}, step=20)  # the same but for rounding: another layout
    again.log_metrics({"tokens": 30.0}, step=30)
    with pytest.warns(UserWarning, match="loss at step 30 was 3 and is 2.5"):
        again.log_metrics({"loss": 2.5}, step=30)
    again.finalize("success")
    assert curve(client, str(again.run_id), "loss") == {10: 10.5, 20: 20.5, 30: 2.5}
    assert curve(client, str(again.run_id), "tokens") == {10: 10.0, 20: 20.0, 30: 30.0}
    assert [step for step, _ in json.loads(client.get_run(again.run_id).data.tags["scalewright.rewinds"])] == [20, 29]


def test_a_run_without_a_server_is_sent_later(
    client: Any, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything: run, params, tags, metrics, text, file, status. Then the run says what to type."""
    run_dir = tmp_path / "offline"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOBODY)
    with pytest.raises(ConfigError, match=r"no MLflow server answers.*start_offline true"):
        MLflowLogger(experiment="later").check(resume=False)
    logger = MLflowLogger(experiment="later", start_offline=True, finish_seconds=0.3)
    logger.check(resume=False)
    with pytest.warns(
        UserWarning, match=r"takes nothing at the moment.*the server does not answer \(Connection refused\)$"
    ):
        logger.open(run_dir)
        logger.log_params({"lr": 0.1})
        logger.log_tags({"dropped": "[[5, 9]]"})
        values = [1.0, math.nan, math.inf, -math.inf]
        for step, value in enumerate(values):
            logger.log_metrics({"loss": value}, step=step)
        logger.log_text("once upon a time", "samples/3.txt")
        (run_dir / "config.yaml").write_text("a: 1\n")
        logger.log_artifact(run_dir / "config.yaml")
        logger.finalize("success")
    left = capsys.readouterr().err
    assert "did not take 4 points" in left and f"python -m recipes.mlflow_sync {run_dir}" in left
    assert logger.run_id is None

    assert mlflow_sync.main([str(run_dir)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    assert mlflow_sync.main([str(run_dir)]) == 0
    assert "4 points sent" in capsys.readouterr().out
    assert mlflow_sync.main([str(run_dir)]) == 0
    assert ": 0 points sent" in capsys.readouterr().out
    (run,) = client.search_runs([client.get_experiment_by_name("later").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "offline"
    assert run.data.params == {"lr": "0.1"} and run.data.tags["dropped"] == "[[5, 9]]"
    points = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}
    assert points[0] == 1.0 and math.isnan(points[1]) and points[2] > 1e308 and points[3] < -1e308
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    assert (root / "samples/3.txt").read_text() == "once upon a time"
    assert (root / "config.yaml").read_text() == "a: 1\n"
    assert run.info.start_time <= min(point.timestamp for point in client.get_metric_history(run.info.run_id, "loss"))

    # Deleted in MLflow: the next start makes the run anew, whole.
    client.delete_run(run.info.run_id)
    with pytest.warns(UserWarning, match="a new one gets all"):
        again = MLflowLogger(experiment="later")
        again.open(run_dir, resume=True)
        again.log_metrics({"loss": 0.5}, step=4)
        again.finalize("success")
    assert again.run_id != run.info.run_id and steps(client, again.run_id, "loss") == [0, 1, 2, 3, 4]


def test_a_killed_run_is_sent_and_marked_and_a_living_one_left_to_itself(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    process = slow_steps.start_code(OPEN + "logger.log_metrics({'loss': 1.0}, step=1)\ntime.sleep(300)", run_dir)
    give_up = time.monotonic() + 240
    while not (run_dir / FILE).exists() or '"metrics"' not in (run_dir / FILE).read_text():
        assert process.is_alive() and time.monotonic() < give_up
        time.sleep(0.02)
    assert mlflow_sync.main([str(run_dir)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: another process sends") and said.count("\n") == 1
    process.kill()
    process.join()
    assert mlflow_sync.main([str(run_dir)]) == 0
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    assert client.get_run(run_id).info.status == "KILLED" and steps(client, run_id, "loss") == [1]


def test_interrupts_are_told_from_failures(client: Any, tmp_path: Path) -> None:
    for error, status in ((KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED"), (RuntimeError, "FAILED")):
        logger = MLflowLogger(experiment="e")
        logger.open(None)
        try:
            raise error
        except BaseException:
            logger.finalize("failed")  # as Lightning does
        assert client.get_run(logger.run_id).info.status == status


def test_metrics_that_mlflow_refuses_stop_no_others(client: Any, tmp_path: Path) -> None:
    logger = MLflowLogger(experiment="e")
    logger.open(tmp_path / "run")
    with pytest.warns(UserWarning, match="refuses metric bad"):
        logger.log_metrics({"a": 1.0, "bad\tname": 2.0, "z": 3.0}, step=1)
        assert logger.flush()
    logger.log_metrics({"a": 2.0}, step=2)
    logger.finalize("success")
    assert steps(client, logger.run_id, "a") == [1, 2] and steps(client, logger.run_id, "z") == [1]


def test_a_lost_journal(client: Any, tmp_path: Path) -> None:
    """What the run holds is then asked from MLflow."""
    logger = MLflowLogger(experiment="e")
    logger.open(tmp_path / "run")
    for step in (1, 2, 3):
        logger.log_metrics({"loss": float(step)}, step=step)
    logger.finalize("failed")
    (tmp_path / "run" / FILE).unlink()
    again = MLflowLogger(experiment="e")
    again.open(tmp_path / "run", resume=True)
    for step in (2, 3, 4):
        again.log_metrics({"loss": float(step)}, step=step)
    again.finalize("success")
    assert again.run_id == logger.run_id and steps(client, logger.run_id, "loss") == [1, 2, 3, 4]


def test_experiments_that_cannot_be_used_are_one_error(client: Any, tmp_path: Path) -> None:
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(ConfigError, match="takes no run of experiment gone"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MLflowLogger(experiment="gone").open(tmp_path / "run")


def test_a_full_disk_keeps_lines_for_later(tmp_path: Path) -> None:
    """/dev/full refuses every byte; then there is room again, and lines arrive in order."""

    def point(step: int) -> dict[str, Any]:
        return {"step": step, "time": 0, "metrics": {"loss": 1.0}}

    journal = Journal(tmp_path / FILE)
    journal.append(point(0))
    good = journal._file
    journal._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    truncate, os.ftruncate = os.ftruncate, lambda *_: None  # a device has no length
    try:
        journal.append(point(1))
        journal.append(point(2))
    finally:
        os.ftruncate = truncate
        journal._file.close()
    assert journal.waiting == 2 and [record["step"] for record, _ in journal.read()] == [0]
    journal._file = good
    journal.append(point(3))
    assert journal.waiting == 0 and [record["step"] for record, _ in Journal(tmp_path / FILE).read()] == [0, 1, 2, 3]
    journal.close()


def test_child_runs_hang_under_their_parent(client: Any, tmp_path: Path) -> None:
    parent = MLflowLogger(experiment="e", run_name="sweep")
    parent.open(None)
    child = MLflowLogger(experiment="e", run_name="cell", parent_run_id=parent.run_id)
    child.open(None)
    child.finalize("failed")
    parent.finalize("success")
    run = client.get_run(child.run_id)
    assert run.data.tags["mlflow.parentRunId"] == parent.run_id
    assert run.info.status == "FAILED" and run.info.run_name == "cell"
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
