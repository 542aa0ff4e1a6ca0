"""MLflow, one run for one training run, whatever restarts in between and whether or not the server is there."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lm.errors import ConfigError
from plugins.loggers.delivery import RUN_ID_FILE
from plugins.loggers.history import History
from plugins.loggers.journal import FILE, Journal, encode
from plugins.loggers.sender import SENT_FILE, Sender
from plugins.loggers.tracking import absolute_uri, check_store, tracking_uri

_OPEN_SECONDS = 120.0  # a new database is made in some 10 of them
_MOST_SECONDS = 1e6
_KILLED_SECONDS = 5.0  # batch systems that ask a process to end give it little time
# The sender tries again by itself, and a step never waits for it; MLflow's client would try one address for 4 minutes.
_CLIENT_SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


class MLflowLogger(Logger):
    """Writes everything into the run's journal (RUN/metrics.jsonl); a thread brings it to MLflow, in order, once.

    A step waits for neither server nor network. What a server that is away did not get is sent when it is back, by a
    restart of the run, or by `python -m recipes.mlflow_sync RUN`. Each (metric, step) is logged once: steps that a
    restart does again are not logged again, unless their loss differs; see plugins.loggers.history.

    Args:
        experiment: name; made when missing.
        run_name: None takes the run folder's name.
        tags: further tags of the run.
        parent_run_id: nests the run under another in the MLflow UI.
        flush_seconds: longest time that a metric waits before it is sent.
        finish_seconds: how long the end of the run waits for what was not sent.
        start_offline: start a new run although no server answers. One that goes on never needs a server.
    """

    def __init__(
        self,
        experiment: str = "scalewright",
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
        parent_run_id: str | None = None,
        flush_seconds: float = 10.0,
        finish_seconds: float = 60.0,
        start_offline: bool = False,
    ):
        super().__init__()
        if not experiment or not experiment.strip():
            raise ConfigError("trainer.logger: experiment must be a name, got none")
        for name, seconds in (("flush_seconds", flush_seconds), ("finish_seconds", finish_seconds)):
            if not 0 <= seconds <= _MOST_SECONDS:
                raise ConfigError(f"trainer.logger: {name} must be from 0 to {_MOST_SECONDS:g}, got {seconds}")
        self.experiment_name = experiment
        self.run_name = run_name
        self.tags = dict(tags or {})
        self.parent_run_id = parent_run_id
        self.flush_seconds = flush_seconds
        self.finish_seconds = finish_seconds
        self.start_offline = start_offline
        self._folder: Path | None = None  # of a run without a folder of its own
        self._journal: Journal | None = None
        self._history: Any = None
        self._sender: Any = None
        self._finished = False
        self._stopped = False
        self._no_room = False

    @property
    def name(self) -> str:
        return self.experiment_name

    @property
    def version(self) -> str | None:
        return self.run_id

    @property
    def run_id(self) -> str | None:
        """Of the MLflow run; None before there is one."""
        return None if self._sender is None else self._sender.delivery.run_id

    @property
    def pending(self) -> int:
        """Metric values that wait to be sent."""
        return 0 if self._sender is None else self._sender.pending()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MlflowClient, None before the run is open: Lightning asks before a wrong config could be refused."""
        return None if self._sender is None or self.run_id is None else self._sender.delivery.client

    def check(self, resume: bool) -> None:
        """Refuse to start a run that could not be recorded.

        Raises:
            ConfigError: no server answers, and the run is new.
        """
        if not self.start_offline and not resume:
            try:
                check_store(tracking_uri())
            except ConfigError as error:
                hint = (
                    "; --trainer.logger.init_args.start_offline true starts without" if "answers" in str(error) else ""
                )
                raise ConfigError(f"{error}{hint}") from None

    @rank_zero_only
    def open(self, run_dir: Path | None, resume: bool = False) -> None:
        """Start the MLflow run, or go on in the one of `run_dir`.

        Raises:
            ConfigError: a new run, and MLflow does not take it.
        """
        for name, value in _CLIENT_SETTINGS.items():
            os.environ.setdefault(name, value)
        if run_dir is None:
            check_store(tracking_uri())
            self._folder = Path(tempfile.mkdtemp(prefix="scalewright-mlflow-"))
        folder = run_dir or self._folder
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            for name in (FILE, RUN_ID_FILE, SENT_FILE):
                (folder / name).unlink(missing_ok=True)
        self._journal = Journal(folder / FILE)
        self._history = History(self._journal)
        self._sender = Sender(folder, self._journal, absolute_uri(tracking_uri()), self.flush_seconds)
        if self._journal.size == 0:
            if self.run_id is not None:
                self._learn_from_store()
            self._create(None if run_dir is None else run_dir.name)
        self._put("status", status="RUNNING")
        self._sender.start()
        if self.run_id is None and not self.start_offline and not resume:
            self._sender.wait(_OPEN_SECONDS)
            if self.run_id is None:
                self._sender.stop()
                reason = self._sender.refused or self._sender.problem or "no answer"
                raise ConfigError(f"MLflow at {tracking_uri()} takes no run of experiment {self.name}: {reason}")

    def _create(self, folder_name: str | None) -> None:
        tags = {"scalewright.kind": "run", **self.tags}
        if self.parent_run_id:
            tags["mlflow.parentRunId"] = self.parent_run_id
        self._put("create", experiment=self.name, name=self.run_name or folder_name, tags=tags, token=uuid.uuid4().hex)

    def _learn_from_store(self) -> None:
        """A run whose journal was lost, or that was begun before there were any: what it holds is in MLflow only."""
        delivery = self._sender.delivery
        try:
            check_store(delivery.uri)
            for key in delivery.client.get_run(self.run_id).data.metrics:
                for point in delivery.client.get_metric_history(self.run_id, key):
                    self._history.add(point.step, {key: point.value})
        except Exception as error:
            warnings.warn(
                f"the journal of MLflow run {self.run_id} is gone and the store does not answer ({error}):"
                " steps that are done again will be there twice",
                stacklevel=2,
            )

    def _put(self, do: str, **fields: Any) -> None:
        if self._journal is None:
            self.open(None)
        self._append({"do": do, "time": self._history.now_ms(), **fields})

    def _append(self, record: dict[str, Any]) -> None:
        assert self._journal is not None
        self._journal.append(record)
        if self._journal.waiting and not self._no_room:
            warnings.warn(
                f"no room for metrics in {self._journal.path}: they wait in memory until there is, the run goes on",
                stacklevel=2,
            )
        self._no_room = self._journal.waiting > 0
        if self._finished:  # a validation after the training, say
            self._sender.start()

    @rank_zero_only
    def log_params(self, params: dict[str, Any]) -> None:
        """Write params; MLflow keeps the first value of each, so a resumed run's changed ones become tags."""
        self._put("params", params={key: str(value)[:500] for key, value in params.items()})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Lightning's own call; params arrive through log_params instead."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = step or 0
        values = {key: float(value) for key, value in metrics.items()}
        if self._journal is None:
            self.open(None)
        contradiction = self._history.contradiction(step, values)
        if contradiction:
            held_back = self._history.repeated(step)
            self.rewind(step - 1)
            self._log({**held_back, **values}, step)
            warnings.warn(
                f"{contradiction}: this is not the run as it was before its restart. What was logged from step {step}"
                " on is marked as abandoned (docs/tracking.md)",
                stacklevel=2,
            )
            return
        self._log(values, step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        new = self._history.new(step, values)
        if not new:
            return
        row = {key: encode(value) for key, value in new.items()}
        self._append({"step": step, "time": self._history.now_ms(), "metrics": row})
        self._history.add(step, new)

    @rank_zero_only
    def rewind(self, step: int) -> None:
        """The run went back to `step`: what was logged after it is abandoned, what is logged from now on counts."""
        self._put("rewind", step=step)
        self._history.rewind(step)

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags of the run; the newest value of each counts."""
        self._put("tags", tags={key: str(value) for key, value in tags.items()})

    @rank_zero_only
    def stopped(self, by: str) -> None:
        """The run was asked to stop and can go on: it ends as KILLED, with what asked, such as SIGTERM, as a tag."""
        self._stopped = True
        self.log_tags({"stopped_by": by})

    @rank_zero_only
    def log_text(self, text: str, file: str) -> None:
        """Store text as the artifact `file`, such as samples/step-00001000.txt."""
        self._put("text", file=file, text=text)

    @rank_zero_only
    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Store a file, as it is when it is sent."""
        self._put("artifact", path=str(Path(path).absolute()), folder=folder)

    @rank_zero_only
    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until MLflow has all that was logged; False when that took longer."""
        if self._sender is None:
            return True
        self._sender.start()
        done = self._sender.wait(seconds)
        if self._finished:
            self._sender.stop()
        return bool(done)

    @rank_zero_only
    def save(self) -> None:
        """What was logged outlives a power cut from here on. Waits for the disk, not for the server."""
        if self._journal is not None:
            self._journal.sync()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run's MLflow run; wait a bounded time for what was not sent, and say what is left."""
        if self._journal is None or self._sender is None:
            return
        killed = self._stopped or isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit)
        word = "FINISHED" if status in ("success", "finished") else "KILLED" if killed else "FAILED"
        self._put("status", status=word)
        self._sender.wait(min(_KILLED_SECONDS, self.finish_seconds) if killed else self.finish_seconds)
        left = self._sender.offset < self._journal.size
        if left:
            print(
                f"MLflow did not take {self.pending} points yet ({self._sender.problem or 'it is slow'}); they are in"
                f" {self._journal.path}: send them with  python -m recipes.mlflow_sync {self._journal.path.parent}",
                file=sys.stderr,
            )
        self._sender.stop()
        self._journal.close()
        if self._journal.waiting:
            print(
                f"warning: {self._journal.waiting} records found no room in {self._journal.path} and are lost: make"
                " room; a run that goes on from a checkpoint before them logs them again",
                file=sys.stderr,
            )
        self._finished = True
        if self._folder is not None and not left:
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
