"""What a sweep has done, kept in MLflow: one parent run, one child run a cell, and nothing outside of it.

A cell counts as done when its child run carries scalewright.status = complete (or diverged): the tag is the last thing
written, so a run cut off by a kill never looks whole.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from plugins.loggers import tracking
from plugins.loggers.history import latest
from plugins.loggers.tracking import experiment_id_for, patient_uri

RUNNING, COMPLETE, DIVERGED, FAILED, SUPERSEDED = "running", "complete", "diverged", "failed", "superseded"
STOPPED = "stopped"  # by the scheduler of a learning-rate sweep
CELL, TRUNK = "cell", "trunk"  # kinds of child runs
# A diverged cell would diverge again, a stopped one has lost already: they have their answer.
DONE = (COMPLETE, DIVERGED, STOPPED)
_KIND, _STATUS = "scalewright.kind", "scalewright.status"
_SWEEP, _GRID, _CELL, _DRIVER = "scalewright.sweep", "scalewright.grid", "scalewright.cell_id", "scalewright.driver"
_SETTINGS = "scalewright.settings"
_T = TypeVar("_T")


def with_retries(action: Callable[[], _T], seconds: float = 120.0) -> _T:
    """Repeat `action` while the tracking store is busy or away, with growing random pauses, for up to `seconds`."""
    from mlflow.exceptions import MlflowException

    give_up, pause = time.monotonic() + seconds, 0.1
    while True:
        try:
            return action()
        except MlflowException as error:
            # 4xx answers would be the same next time; locks and lost connections arrive as 5xx.
            if error.get_http_status_code() < 500 or time.monotonic() > give_up:
                raise
        time.sleep(pause * (0.5 + random.random()))
        pause = min(2 * pause, 5.0)


@dataclass(frozen=True)
class SweepRun:
    """A parent run. driver is {host, pid, started, session} of the process that last worked on it; settings are those
    of `describe`, empty where nobody wrote any."""

    run_id: str
    grid: str
    status: str
    driver: dict[str, Any]
    settings: dict[str, str]


@dataclass(frozen=True)
class CellRun:
    """A child run; status is its scalewright.status, params and metrics as MLflow has them (newest values)."""

    run_id: str
    cell_id: str
    status: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]


class SweepLedger:
    """Reads and writes the parent and child runs of sweeps in one experiment (made when missing).

    Args:
        uri: MLflow tracking address.
        experiment: name.
    """

    def __init__(self, uri: str, experiment: str):
        from mlflow.tracking import MlflowClient

        self.uri = uri
        self.experiment = experiment
        self.client = MlflowClient(tracking_uri=patient_uri(uri))
        self.experiment_id: str = with_retries(lambda: experiment_id_for(self.client, experiment))

    def sweeps(self, name: str) -> list[SweepRun]:
        """Parents of that name, newest first."""
        runs = self._search(f"tags.`{_KIND}` = 'sweep' and tags.`{_SWEEP}` = '{name}'")
        return [
            SweepRun(
                run.info.run_id,
                run.data.tags.get(_GRID, ""),
                run.data.tags.get(_STATUS, ""),
                json.loads(run.data.tags.get(_DRIVER, "{}")),
                json.loads(run.data.tags.get(_SETTINGS, "{}")),
            )
            for run in runs
        ]

    def cells(self, parent_run_id: str, kind: str = CELL) -> list[CellRun]:
        """Child runs of a parent, newest first, whatever their status.

        Args:
            kind: cell, or trunk, whose cell_id is the trunk's.
        """
        runs = self._search(f"tags.`{_KIND}` = '{kind}' and tags.`mlflow.parentRunId` = '{parent_run_id}'")
        return [
            CellRun(
                run.info.run_id,
                run.data.tags.get(_CELL, ""),
                run.data.tags.get(_STATUS, ""),
                run.data.params,
                with_retries(lambda run=run: latest(self.client, run)),  # type: ignore[misc]
                run.data.tags,
            )
            for run in runs
        ]

    def _search(self, query: str) -> list[Any]:
        return tracking.search_runs(self.client, [self.experiment_id], query, call=with_retries)

    def create_sweep(self, name: str, grid: str, params: dict[str, Any], note: str) -> str:
        """Start a parent run; its id."""
        from mlflow.entities import Param

        tags = {_KIND: "sweep", _SWEEP: name, _GRID: grid, _STATUS: RUNNING, "mlflow.note.content": note}
        run_id: str = with_retries(
            lambda: self.client.create_run(self.experiment_id, tags=tags, run_name=f"sweep {name}").info.run_id
        )
        rows = [Param(key, str(value)[:500]) for key, value in params.items()]
        with_retries(lambda: self.client.log_batch(run_id, params=rows))
        return run_id

    def describe(self, parent_run_id: str, settings: dict[str, str]) -> None:
        """Write down what the cells of a parent are measured with."""
        self._tag(parent_run_id, {_SETTINGS: json.dumps(settings, sort_keys=True)})

    def claim(self, parent_run_id: str, grid: str, driver: dict[str, Any]) -> None:
        """Write down who works on a parent from now on, and on which grid."""
        self._tag(parent_run_id, {_GRID: grid, _DRIVER: json.dumps(driver), _STATUS: RUNNING})
        with_retries(lambda: self.client.update_run(parent_run_id, status="RUNNING"))

    def finish_sweep(self, parent_run_id: str, status: str, metrics: dict[str, float]) -> None:
        """End a parent: its status tag, MLflow's status, and totals."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(key, float(value), now_ms, 0) for key, value in metrics.items()]
        with_retries(lambda: self.client.log_batch(parent_run_id, metrics=rows))
        self._end(parent_run_id, status, {COMPLETE: "FINISHED", FAILED: "FAILED"}.get(status, "KILLED"))

    def supersede(self, runs: Iterable[CellRun]) -> int:
        """Mark unfinished child runs of a dead worker, so that no reader takes them for a result; how many."""
        count = 0
        for run in runs:
            if run.status not in (*DONE, FAILED, SUPERSEDED):
                self._end(run.run_id, SUPERSEDED, "KILLED")
                count += 1
        return count

    def replace_failed(self, runs: Iterable[CellRun], statuses: tuple[str, ...] = (FAILED,)) -> None:
        """Mark failed child runs that are about to run again."""
        for run in runs:
            if run.status in statuses:
                self._tag(run.run_id, {_STATUS: SUPERSEDED})

    def reopen_cell(self, run_id: str) -> None:
        """A cell that was cut off goes on from its checkpoint, in the same run."""
        with_retries(lambda: self.client.update_run(run_id, status="RUNNING"))
        self._tag(run_id, {_STATUS: RUNNING})

    def close_cell(self, run_id: str, status: str, error: str = "") -> bool:
        """Write a cell's last word; False when somebody superseded the run in the meantime."""
        if with_retries(lambda: self.client.get_run(run_id)).data.tags.get(_STATUS) == SUPERSEDED:
            return False
        if error:
            self._tag(run_id, {"scalewright.error": error[:5000]})
        self._end(run_id, status, "FAILED" if status == FAILED else "FINISHED")
        return True

    def stop_cell(self, run_id: str, step: int, error: str) -> None:
        """Record a cell that its scheduler stopped, and after how many steps."""
        from mlflow.entities import Metric

        row = Metric("stopped_step", float(step), int(time.time() * 1000), step)
        with_retries(lambda: self.client.log_batch(run_id, metrics=[row]))
        self.close_cell(run_id, STOPPED, error)

    def fail_cell(
        self, parent_run_id: str, cell_id: str, label: str, error: str, status: str = FAILED, kind: str = CELL
    ) -> None:
        """Record a cell without a result: in its open child run, or in a new one when it never got that far."""
        runs = self.cells(parent_run_id, kind)
        open_runs = [run for run in runs if run.cell_id == cell_id and run.status == RUNNING]
        if open_runs:
            self.close_cell(open_runs[0].run_id, status, error)
            return
        tags = {_KIND: kind, _CELL: cell_id, "mlflow.parentRunId": parent_run_id}
        run = with_retries(lambda: self.client.create_run(self.experiment_id, tags=tags, run_name=label))
        self.close_cell(run.info.run_id, status, error)

    def _end(self, run_id: str, status: str, mlflow_status: str) -> None:
        with_retries(lambda: self.client.set_terminated(run_id, mlflow_status))
        self._tag(run_id, {_STATUS: status})  # last: this is what readers go by

    def _tag(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        rows = [RunTag(key, value) for key, value in tags.items()]
        with_retries(lambda: self.client.log_batch(run_id, tags=rows))


def trunk_tags(trunk_id: str) -> dict[str, str]:
    """Tags a trunk's run is created with."""
    return {_KIND: TRUNK, _CELL: trunk_id, _STATUS: RUNNING}


def cell_tags(cell_id: str, budget_flops: float) -> dict[str, str]:
    """Tags a cell's run is created with."""
    return {_KIND: CELL, _CELL: cell_id, _STATUS: RUNNING, "scalewright.budget_flops": f"{budget_flops:g}"}


def this_driver(session: str = "") -> dict[str, Any]:
    """Who this process is: host, process id, its start (clock ticks since boot), Ray session."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "session": session}


def is_alive(driver: dict[str, Any]) -> bool:
    """Whether the process that worked on a sweep still runs; unknown (False) when it ran on another host."""
    if driver.get("host") != socket.gethostname() or "pid" not in driver or driver["pid"] == os.getpid():
        return False
    started = _started(driver["pid"])
    return started is not None and started == driver.get("started")


def _started(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()  # the name in brackets may hold spaces
    return None if state == "Z" else int(rest[18])
