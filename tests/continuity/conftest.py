"""One folder with data, a config and an MLflow database for all runs of these tests; each has a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.continuity.launch import write_experiment


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continuity")
    return write_experiment(folder, steps=24, every=3, validate_every=4)
