"""MLflow, one run for one training run, whatever restarts in between."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from plugins.loggers.tracking import check_store, experiment_id_for, tracking_uri

_MAX_METRICS_A_BATCH = 1000  # MLflow's own limit
_MAX_PARAMS_A_BATCH = 100


class MLflowLogger(Logger):
    """Buffers metrics and sends them in batches; a resumed run goes on in the same MLflow run without doubling a row.

    Args:
        experiment: name; made when missing.
        run_name: None takes the run folder's name.
        tags: further tags of the run.
        parent_run_id: nests the run under another in the MLflow UI.
        flush_seconds: longest time that a metric waits before it is sent.
    """

    def __init__(
        self,
        experiment: str = "scalewright",
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
        parent_run_id: str | None = None,
        flush_seconds: float = 10.0,
    ):
        super().__init__()
        self.experiment_name = experiment
        self.run_name = run_name
        self.tags = dict(tags or {})
        self.parent_run_id = parent_run_id
        self.flush_seconds = flush_seconds
        self.run_id: str | None = None
        self._client: Any = None
        self._buffer: list[Any] = []
        self._flushed_at = time.monotonic()
        self._resumed = False
        self._last_steps: dict[str, int] = {}
        self._stopped = False

    @property
    def name(self) -> str:
        return self.experiment_name

    @property
    def version(self) -> str | None:
        return self.run_id

    @property
    def pending(self) -> int:
        """Metrics that wait to be sent."""
        return len(self._buffer)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MlflowClient, None before the run is open: Lightning asks before a wrong config could be refused."""
        return self._client

    def _open_client(self) -> Any:
        if self.run_id is None:
            self.open(None)
        return self._client

    @rank_zero_only
    def open(self, run_dir: Path | None, resume: bool = False) -> None:
        """Start the MLflow run, or go on in the one that `run_dir`/mlflow_run_id names."""
        from mlflow.tracking import MlflowClient

        check_store(tracking_uri())
        self._client = MlflowClient(tracking_uri=tracking_uri())
        note = run_dir / "mlflow_run_id" if run_dir is not None else None
        if resume and note is not None and note.exists():
            run_id = note.read_text().strip()
            if self._reopen(run_id):
                return
        tags = {"scalewright.kind": "run", **self.tags}
        if self.parent_run_id:
            tags["mlflow.parentRunId"] = self.parent_run_id
        run_name = self.run_name or (run_dir.name if run_dir is not None else None)
        experiment_id = experiment_id_for(self._client, self.experiment_name)
        self.run_id = self._client.create_run(experiment_id, tags=tags, run_name=run_name).info.run_id
        if note is not None:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(self.run_id + "\n")

    def _reopen(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException:
            warnings.warn(f"MLflow run {run_id} is not in {tracking_uri()}; a new one is started", stacklevel=2)
            return False
        self.run_id, self._resumed = run_id, True
        return True

    @rank_zero_only
    def log_params(self, params: dict[str, Any]) -> None:
        """Write params; MLflow keeps the first value of each, so a resumed run's changed ones become tags."""
        from mlflow.entities import Param

        client = self._open_client()
        known = client.get_run(self.run_id).data.params if self._resumed else {}
        new = []
        for key, value in params.items():
            text = str(value)[:500]
            if key not in known:
                new.append(Param(key, text))
            elif known[key] != text:
                client.set_tag(self.run_id, f"resumed.{key}", text)
        for start in range(0, len(new), _MAX_PARAMS_A_BATCH):
            client.log_batch(self.run_id, params=new[start : start + _MAX_PARAMS_A_BATCH])

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Lightning's own call; params arrive through log_params instead."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        self._open_client()
        now_ms = int(time.time() * 1000)
        step = step or 0
        for key, value in metrics.items():
            if self._resumed and step <= self._last_step(key):
                continue  # sent before the restart; sending it again would double the row
            self._buffer.append(Metric(key, float(value), now_ms, step))
        if time.monotonic() - self._flushed_at > self.flush_seconds:
            self.flush()

    def _last_step(self, key: str) -> int:
        if key not in self._last_steps:
            history = self._client.get_metric_history(self.run_id, key)
            self._last_steps[key] = max((metric.step for metric in history), default=-1)
        return self._last_steps[key]

    @rank_zero_only
    def flush(self) -> None:
        """Send what is buffered; on failure warn, keep it, and try again later."""
        self._flushed_at = time.monotonic()
        try:
            while self._buffer:
                batch = self._buffer[:_MAX_METRICS_A_BATCH]
                self._client.log_batch(self.run_id, metrics=batch)
                del self._buffer[: len(batch)]
        except Exception as error:  # training must not stop because a tracking server does
            warnings.warn(f"MLflow did not take {len(self._buffer)} metrics, will retry: {error}", stacklevel=2)

    @rank_zero_only
    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self._open_client().log_artifact(self.run_id, str(path), folder)

    def save(self) -> None:
        self.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.run_id is None:
            return
        self.flush()
        ended = "FINISHED" if status in ("success", "finished") else "KILLED" if self._stopped else "FAILED"
        self._client.set_terminated(self.run_id, ended)

    @rank_zero_only
    def stopped(self, by: str) -> None:
        """The run was asked to stop and can go on: it ends as KILLED, with what asked, such as SIGTERM, as a tag."""
        self._stopped = True
        try:
            self._open_client().set_tag(self.run_id, "stopped_by", by)
        except Exception as error:
            warnings.warn(f"MLflow did not take the tag stopped_by {by}: {error}", stacklevel=2)
