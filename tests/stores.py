"""MLflow stores of their own for tests: copies of one that is made once a process. Making its tables takes seconds and
hundreds of writes that wait for the disk."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

_KEEP: list[tempfile.TemporaryDirectory[str]] = []


def new_store(folder: Path | str) -> str:
    """Address of an empty SQLite store `mlflow.db` in the folder, which is made if need be."""
    path = Path(folder) / "mlflow.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_empty(), path)
    return f"sqlite:///{path}"


@functools.cache
def _empty() -> Path:
    from mlflow.tracking import MlflowClient

    folder = tempfile.TemporaryDirectory(prefix="scalewright-mlflow-")
    _KEEP.append(folder)  # removed when the process ends
    path = Path(folder.name) / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path
