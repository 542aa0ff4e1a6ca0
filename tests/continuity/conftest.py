"""One folder with data, a config and an MLflow database for all runs of these tests; each has a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.continuity.launch import write_experiment


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mlflow.tracking import MlflowClient

    folder = tmp_path_factory.mktemp("continuity")
    # Making the tables takes seconds: a test that kills, or whose ranks wait for a few seconds only, must find them.
    MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments()
    return write_experiment(folder, steps=24, every=3, validate_every=4)
