"""The MLflow logger against a real SQLite store."""

from pathlib import Path

import pytest

from plugins.loggers.mlflow import MLflowLogger


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(tracking_uri=uri)


def steps(client, run_id: str, key: str) -> list[int]:
    return [metric.step for metric in client.get_metric_history(run_id, key)]


def test_one_run_across_restarts_and_no_row_twice(client, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    first = MLflowLogger(experiment="e", tags={"team": "a"})
    first.open(run_dir)
    first.log_params({"lr": 0.1, "d_model": 64})
    for step in (10, 20, 30):
        first.log_metrics({"loss": 1 / step}, step=step)
    first.flush()  # then the process dies at step 35; the newest checkpoint is step 20

    second = MLflowLogger(experiment="e")
    second.open(run_dir, resume=True)
    second.log_params({"lr": 0.2, "d_model": 64})
    for step in (30, 40):
        second.log_metrics({"loss": 1 / step, "grad_norm": 1.0}, step=step)
    second.finalize("success")

    assert second.run_id == first.run_id
    assert steps(client, first.run_id, "loss") == [10, 20, 30, 40]
    assert steps(client, first.run_id, "grad_norm") == [30, 40]
    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.1" and run.data.tags["resumed.lr"] == "0.2"
    assert run.data.tags["team"] == "a" and run.info.run_name == "one"


def test_metrics_wait_while_the_store_is_away(client, tmp_path: Path) -> None:
    logger = MLflowLogger(experiment="e")
    logger.open(tmp_path / "run")
    real, calls = logger._client.log_batch, []

    def away(*args, **kwargs):
        calls.append(args)
        raise ConnectionError("no server")

    logger._client.log_batch = away
    logger.log_metrics({"loss": 1.0}, step=1)
    with pytest.warns(UserWarning, match="will retry"):
        logger.flush()
    logger._client.log_batch = real
    logger.log_metrics({"loss": 2.0}, step=2)
    logger.flush()
    assert calls and steps(client, logger.run_id, "loss") == [1, 2]


def test_child_runs_hang_under_their_parent(client, tmp_path: Path) -> None:
    parent = MLflowLogger(experiment="e", run_name="sweep")
    parent.open(None)
    child = MLflowLogger(experiment="e", run_name="cell", parent_run_id=parent.run_id)
    child.open(None)
    child.finalize("failed")
    run = client.get_run(child.run_id)
    assert run.data.tags["mlflow.parentRunId"] == parent.run_id
    assert run.info.status == "FAILED" and run.info.run_name == "cell"
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
