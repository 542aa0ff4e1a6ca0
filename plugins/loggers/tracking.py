"""Where MLflow's records live. Importing this costs nothing, unlike the logger beside it."""

from __future__ import annotations

import os
from typing import Any

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or a SQLite file in the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI


def experiment_id_for(client: Any, name: str) -> str:
    """Id of the experiment, made when missing, tagged so that the MLflow UI shows metric columns."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return experiment.experiment_id
    try:
        return client.create_experiment(name, tags={"mlflow.experimentKind": "custom_model_development"})
    except MlflowException:
        # Another process made it in between.
        return client.get_experiment_by_name(name).experiment_id
