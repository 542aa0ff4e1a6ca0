"""Brings a journal's records to MLflow, each exactly once, however often it has to be tried."""

from __future__ import annotations

import json
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.data.files import write_bytes
from plugins.loggers.history import REWINDS, rewinds_of
from plugins.loggers.tracking import experiment_id_for, patient_uri

RUN_ID_FILE = "mlflow_run_id"
TOKEN = "scalewright.token"
METRICS_A_BATCH = 1000  # MLflow's own limits
_PARAMS_A_BATCH = 100
_TAG_LENGTH = 5000
_REWINDS_KEPT = 100


class Point(NamedTuple):
    """One value of one metric; time in ms."""

    key: str
    value: float
    time: int
    step: int


def run_id_of(run_dir: Path) -> str | None:
    """MLflow run of a run's folder; None before there is one."""
    note = run_dir / RUN_ID_FILE
    return note.read_text().strip() or None if note.is_file() else None


class Delivery:
    """One run's records, in order. Every method may raise anything; calling it again is safe.

    Args:
        run_dir: holds the run's id in a file, once there is a run.
        uri: MLflow tracking address.

    Attributes:
        run_id: None before the run exists.
    """

    def __init__(self, run_dir: Path, uri: str):
        self.run_dir = run_dir
        self.uri = uri
        self.run_id = run_id_of(run_dir)
        self._client: Any = None
        self._there: dict[str, set[tuple[int, int]]] = {}  # key -> (step, time) of points that the store has
        self._there_since = 0

    @property
    def client(self) -> Any:
        """The MlflowClient; with a database address this opens it."""
        if self._client is None:
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=patient_uri(self.uri))
        return self._client

    def is_gone(self) -> bool:
        """The store answers, and says that the run is not there (or was deleted)."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(self.run_id).info.lifecycle_stage != "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return True
            raise

    def forget_run(self) -> None:
        """The next create record makes a new one."""
        (self.run_dir / RUN_ID_FILE).unlink(missing_ok=True)
        self.run_id = None

    def doubt(self, since_ms: int) -> None:
        """What was sent last may have arrived without an answer: ask before points of this time or later go again."""
        self._there, self._there_since = {}, since_ms

    def metrics(self, points: Sequence[Point], doubtful: bool) -> None:
        """Send points.

        Args:
            doubtful: some of them may be there already.
        """
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        if doubtful:
            points = [point for point in points if (point.step, point.time) not in self._stored(point.key)]
        rows = [Metric(point.key, point.value, point.time, point.step) for point in points]
        if not rows:
            return
        try:
            self.client.log_batch(self.run_id, metrics=rows)
        except MlflowException as error:
            if not is_refusal(error) or self.is_gone():
                raise
            if len(points) == 1:
                warnings.warn(
                    f"MLflow refuses metric {points[0].key}, it stays in the journal: {one_line(error)}", stacklevel=2
                )
                return
            for half in (points[: len(points) // 2], points[len(points) // 2 :]):
                self.metrics(half, doubtful=False)

    def _stored(self, key: str) -> set[tuple[int, int]]:
        # A time is part of what makes a point one: the journal gives each (metric, step, time) once.
        if key not in self._there:
            history = self.client.get_metric_history(self.run_id, key)
            self._there[key] = {(m.step, m.timestamp) for m in history if m.timestamp >= self._there_since}
        return self._there[key]

    def other(self, record: dict[str, Any]) -> None:
        """Do what a record without metrics asks for. What MLflow refuses for good is warned of and passed over."""
        from mlflow.exceptions import MlflowException

        action = getattr(self, f"_do_{record.get('do')}", None)
        if action is None:
            return  # of a newer version
        try:
            action(record)
        except MlflowException as error:
            if not is_refusal(error) or self.run_id is None or self.is_gone():
                raise
            warnings.warn(f"MLflow refuses {record['do']} of {self.run_dir}: {one_line(error)}", stacklevel=2)

    def _do_create(self, record: dict[str, Any]) -> None:
        if self.run_id is not None:
            return
        experiment = experiment_id_for(self.client, record["experiment"])
        # An answer may have been lost: the run is then known by its token.
        found = self.client.search_runs([experiment], f"tags.`{TOKEN}` = '{record['token']}'", max_results=1)
        if found:
            run = found[0]
        else:
            tags = {**record["tags"], TOKEN: record["token"]}
            run = self.client.create_run(experiment, start_time=record["time"], tags=tags, run_name=record["name"])
        write_bytes(self.run_dir / RUN_ID_FILE, f"{run.info.run_id}\n".encode())
        self.run_id = run.info.run_id

    def _do_params(self, record: dict[str, Any]) -> None:
        """MLflow keeps the first value of each param; a resumed run's changed ones become tags."""
        from mlflow.entities import Param, RunTag

        known = self.client.get_run(self.run_id).data.params
        params = record["params"]
        new = [Param(key, text) for key, text in params.items() if key not in known]
        for start in range(0, len(new), _PARAMS_A_BATCH):
            self.client.log_batch(self.run_id, params=new[start : start + _PARAMS_A_BATCH])
        changed = [RunTag(f"resumed.{key}", text) for key, text in params.items() if known.get(key, text) != text]
        for start in range(0, len(changed), _PARAMS_A_BATCH):
            self.client.log_batch(self.run_id, tags=changed[start : start + _PARAMS_A_BATCH])

    def _do_tags(self, record: dict[str, Any]) -> None:
        for key, text in record["tags"].items():
            self.client.set_tag(self.run_id, key, text[:_TAG_LENGTH])

    def _do_artifact(self, record: dict[str, Any]) -> None:
        if not Path(record["path"]).exists():
            warnings.warn(f"{record['path']} is gone and was not sent to MLflow", stacklevel=2)
            return
        self.client.log_artifact(self.run_id, record["path"], record["folder"])

    def _do_text(self, record: dict[str, Any]) -> None:
        self.client.log_text(self.run_id, record["text"], record["file"])

    def _do_rewind(self, record: dict[str, Any]) -> None:
        known = rewinds_of(self.client.get_run(self.run_id).data.tags)
        mark = (int(record["step"]), int(record["time"]))
        if mark not in known:
            text = json.dumps([*known, mark][-_REWINDS_KEPT:])
            self.client.set_tag(self.run_id, REWINDS, text)

    def _do_status(self, record: dict[str, Any]) -> None:
        if record["status"] == "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            self.client.set_terminated(self.run_id, record["status"], end_time=record["time"])


def is_refusal(error: BaseException) -> bool:
    """It would be refused the next time as well."""
    return getattr(error, "error_code", "") in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST")


def one_line(error: BaseException) -> str:
    """An error's message, shortened; of a connection that failed, why, and not the whole tower of layers above it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError | TimeoutError | socket.gaierror) and getattr(cause, "strerror", None):
            return f"the server does not answer ({cause.strerror})"
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__
