"""MLflow as sweeps use it: a client, the runs of an experiment, one finished run written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from plugins.loggers import tracking

KIND = "scalewright.kind"


def client(tracking_uri: str | None = None) -> Any:
    """MlflowClient at `tracking_uri`, else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory.

    Raises:
        ConfigError: nobody answers there, or its database cannot be opened.
    """
    from mlflow.tracking import MlflowClient

    uri = tracking_uri or tracking.tracking_uri()
    _check_store(uri)
    return MlflowClient(uri)


def require_store(tracking_uri: str | None = None) -> None:
    """Before reading: a client would make a database that is not there, and find it empty.

    Raises:
        ConfigError: the SQLite database is missing.
    """
    uri = tracking_uri or tracking.tracking_uri()
    path = Path(uri.removeprefix("sqlite:///").partition("?")[0])
    if uri.startswith("sqlite:///") and not path.exists():
        raise ConfigError(f"there is no MLflow database {path}; change folder, or set MLFLOW_TRACKING_URI")


@cache
def _check_store(uri: str) -> None:
    """Once for each address: a report makes many clients."""
    tracking.check_store(uri)


def experiment_id(mlflow_client: Any, experiment: str) -> str:
    """Id of a named experiment.

    Raises:
        ValueError: no such experiment; the message lists those there are.
    """
    found = mlflow_client.get_experiment_by_name(experiment)
    if found is None:
        names = ", ".join(e.name for e in mlflow_client.search_experiments(max_results=20)) or "none"
        raise ValueError(f"MLflow has no experiment {experiment!r}; it has {names} (set MLFLOW_TRACKING_URI?)")
    return str(found.experiment_id)


def search_all(mlflow_client: Any, experiment: str, query: str = "") -> list[Any]:
    """Every run of a named experiment that the query finds, newest first."""
    return tracking.search_runs(mlflow_client, [experiment_id(mlflow_client, experiment)], query)


def log_run(
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, object],
    metrics: Mapping[str, float],
    artifacts: Iterable[Path] = (),
    parent_run_id: str | None = None,
    tracking_uri: str | None = None,
    note: str = "",
) -> str:
    """Writes one finished run (a fit or a forecast) and returns its id; makes the experiment when it is missing.

    Args:
        artifacts: files, and folders that keep their name.
    """
    from mlflow.entities import Metric, Param, RunTag

    mlflow_client = client(tracking_uri)
    identity = tracking.experiment_id_for(mlflow_client, experiment)
    every = {"mlflow.note.content": note, **tags}
    if parent_run_id:
        every["mlflow.parentRunId"] = parent_run_id
    run_id = str(mlflow_client.create_run(identity, run_name=name, tags=every).info.run_id)
    now = int(time.time() * 1000)
    mlflow_client.log_batch(
        run_id,
        metrics=[Metric(key, value, now, 0) for key, value in metrics.items()],
        params=[Param(key, str(value)[:500]) for key, value in params.items()],
        tags=[RunTag("scalewright.status", "complete")],
    )
    for path in artifacts:
        if path.is_dir():
            mlflow_client.log_artifacts(run_id, str(path), path.name)
        else:
            mlflow_client.log_artifact(run_id, str(path))
    mlflow_client.set_terminated(run_id)
    return run_id
