"""Reads the metrics of one MLflow run back."""

from __future__ import annotations

from pathlib import Path

from lm.errors import ConfigError
from plugins.loggers.delivery import RUN_ID_FILE, run_id_of
from plugins.loggers.history import curve
from plugins.loggers.tracking import check_store, tracking_uri


def metric_history(run: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every metric by name, in the order of steps; of steps that a roll-back gave up, none.

    Args:
        run: a run's folder, or the id of an MLflow run in the store of MLFLOW_TRACKING_URI.

    Raises:
        ConfigError: there is no such run.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    run_id = run_id_of(Path(run)) if Path(run).is_dir() else run
    if run_id is None:
        raise ConfigError(f"{run} has no file {RUN_ID_FILE}, so it is no run's folder; or give an MLflow run's id")
    check_store(tracking_uri())
    client = MlflowClient(tracking_uri=tracking_uri())
    try:
        names = client.get_run(run_id).data.metrics
    except MlflowException:
        raise ConfigError(f"there is no MLflow run {run_id} in {tracking_uri()}; set MLFLOW_TRACKING_URI") from None
    return {name: list(curve(client, run_id, name).items()) for name in names}
