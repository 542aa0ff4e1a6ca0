"""Training against a real MLflow server on PostgreSQL that is killed, restarted and loses answers meanwhile."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.data.synthetic import random_documents, write_folder
from plugins.loggers.journal import FILE
from tests.plugins import slow_steps
from tests.plugins.mlflow_server import LossyProxy, MLflowServer, postgres, postgres_programs

pytestmark = [
    pytest.mark.skipif(postgres_programs() is None, reason="no PostgreSQL here (Debian: apt-get install postgresql)"),
    pytest.mark.timeout(600),
]
STEPS = 60


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as address:
        yield address


@pytest.fixture(scope="module")
def server(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    server = MLflowServer(database, tmp_path_factory.mktemp("server"))
    server.start()
    slow_steps.preload()  # imports on the other core meanwhile
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps, each logged, a checkpoint every 10."""
    folder = tmp_path_factory.mktemp("run")
    documents = {
        "train": random_documents(20_000, 300, 60, 0),
        "validation": random_documents(2_000, 300, 60, 1),
    }
    write_folder(folder / "data", {"prose": documents}, vocab_size=300)
    callbacks = [
        {"class_path": "plugins.callbacks.throughput.Throughput"},
        {"class_path": "plugins.callbacks.checkpoint.PeriodicCheckpoint", "init_args": {"every_n_steps": 10}},
        {"class_path": "tests.plugins.slow_steps.SlowSteps"},
    ]
    logger = {"flush_seconds": 0.2, "finish_seconds": 300.0}
    settings = {
        "runs_dir": str(folder / "runs"),
        "tokens": STEPS * 128,
        "model": {"config": {"vocab_size": 300, "d_model": 16, "n_layers": 1, "n_heads": 2}},
        "data": {
            "dir": str(folder / "data"),
            "sequence_length": 32,
            "global_batch_tokens": 128,
            "validation_windows": 8,
        },
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "log_every_n_steps": 1,
            "val_check_interval": 20,
            "callbacks": callbacks,
            "logger": {"class_path": "plugins.loggers.mlflow.MLflowLogger", "init_args": logger},
        },
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(settings))
    return folder


def start(experiment: Path, server: MLflowServer, name: str, *arguments: str) -> Any:
    line = ["fit", "--config", str(experiment / "experiment.yaml"), "--name", name, *arguments]
    return slow_steps.start_run(line, {"MLFLOW_TRACKING_URI": server.uri}, experiment / f"{name}.log")


def until(condition: Callable[[], bool], log: Path, seconds: float = 240) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, log.read_text()[-3000:] if log.exists() else "nothing was written"
        time.sleep(0.02)


def ended(process: Any, log: Path) -> None:
    process.join(timeout=400)
    assert process.exitcode == 0, log.read_text()[-3000:]


def query(database: str, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    import psycopg2

    connection = psycopg2.connect(host=database.partition("host=")[2], user="postgres", dbname="postgres")
    try:
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall()
    finally:
        connection.close()


def stored(database: str, run_id: str) -> dict[str, list[tuple[int, float, int]]]:
    """(step, value, time) of each metric, in the order of the transactions that brought them, then of steps."""
    table: dict[str, list[tuple[int, float, int]]] = {}
    order = "xmin::text::bigint, step"
    rows = query(
        database, f"select key, step, value, timestamp from metrics where run_uuid = %s order by {order}", run_id
    )
    for key, step, value, time_ms in rows:
        table.setdefault(key, []).append((step, value, time_ms))
    return table


def run_id_of(folder: Path) -> str:
    return (folder / "mlflow_run_id").read_text().strip()


def last_step(folder: Path) -> int:
    path = folder / FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((json.loads(line).get("step", 0) for line in lines), default=0)


def test_server_and_training_are_killed(database: str, server: MLflowServer, experiment: Path) -> None:
    """The server dies, training goes on; training dies, and starts again without a server; the server comes back:
    one run, every point once, in order, as in a run that nothing happened to."""
    runs, log = experiment / "runs", experiment / "torn.log"
    ended(start(experiment, server, "whole"), experiment / "whole.log")
    victim = start(experiment, server, "torn")
    until(lambda: (runs / "torn" / "mlflow_run_id").exists() and last_step(runs / "torn") >= 8, log)
    run_id = run_id_of(runs / "torn")
    until(lambda: len(stored(database, run_id).get("loss", [])) >= 4, log)
    server.kill()
    killed_at = last_step(runs / "torn")
    until(lambda: last_step(runs / "torn") >= killed_at + 15, log)  # the run goes on
    assert victim.exitcode is None
    victim.kill()
    victim.join()
    before = last_step(runs / "torn")
    assert before < STEPS and query(database, "select status from runs where run_uuid = %s", run_id) == [("RUNNING",)]

    again = start(experiment, server, "torn", "--ckpt_path", "last")
    until(lambda: last_step(runs / "torn") > before, log)  # nobody answers, and it trains on
    assert again.exitcode is None and not server.answers()
    server.start()
    ended(again, log)

    assert run_id_of(runs / "torn") == run_id
    found, expected = stored(database, run_id), stored(database, run_id_of(runs / "whole"))
    assert found.keys() == expected.keys()
    for key, rows in found.items():
        assert [step for step, _, _ in rows] == [step for step, _, _ in expected[key]], key
        times = [time_ms for _, _, time_ms in rows]
        assert times == sorted(times), key
    assert [step for step, _, _ in found["loss"]] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "lr", "val_loss", "tokens"):
        assert [row[:2] for row in found[key]] == [row[:2] for row in expected[key]], key
    assert query(database, "select status from runs where run_uuid = %s", run_id) == [("FINISHED",)]
    assert query(database, "select count(*) from tags where run_uuid = %s and key like 'resumed.%%'", run_id) == [(0,)]
    (artifacts,) = (server.folder / "art").glob(f"*/{run_id}/artifacts")
    assert (artifacts / "config.yaml").read_bytes() == (runs / "torn" / "config.yaml").read_bytes()
    text = log.read_text()
    assert "MLflow takes nothing at the moment" in text and "MLflow is back" in text


def test_answers_that_are_lost(
    database: str, server: MLflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has done what it was asked for, and the answer never came: nothing is there twice."""
    from plugins.loggers.mlflow import MLflowLogger

    if not server.answers():
        server.start()
        server.wait()
    proxy = LossyProxy(server.port)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.uri)
    proxy.lose = "runs/create"
    logger = MLflowLogger(experiment="lossy", flush_seconds=0.1, start_offline=True)
    with pytest.warns(UserWarning, match="MLflow takes nothing"):
        logger.open(tmp_path / "run")
        until(lambda: bool(proxy.lost), tmp_path)
        proxy.lose = ""
        assert logger.flush()
    values = {0: 1.5, 1: math.nan, 2: math.inf, 3: -math.inf, 4: 0.1 + 0.2}
    proxy.lose = "log-batch"
    with pytest.warns(UserWarning, match="MLflow is back"):
        for step, value in values.items():
            logger.log_metrics({"x": value, "y": float(step)}, step=step)
        logger.log_params({"lr": 0.1})
        until(lambda: sum("log-batch" in path for path in proxy.lost) >= 2, tmp_path)
        committed = stored(database, str(logger.run_id))
        assert committed["x"], "the server has taken points whose answer was lost"
        proxy.lose = ""
        logger.finalize("success")
    runs = query(database, "select r.run_uuid, r.status from runs r join experiments e using (experiment_id)"
                 " where e.name = 'lossy'")  # fmt: skip
    assert runs == [(logger.run_id, "FINISHED")]
    found = stored(database, str(logger.run_id))
    assert [step for step, _, _ in found["x"]] == [step for step, _, _ in found["y"]] == list(values)
    assert query(database, "select key, value from params where run_uuid = %s", logger.run_id) == [("lr", "0.1")]
    points = logger.experiment.get_metric_history(logger.run_id, "x")
    by_step = {point.step: point.value for point in points}
    assert math.isnan(by_step[1]) and by_step[2] > 1e308 and by_step[3] < -1e308 and by_step[4] == values[4]
    proxy.close()
