"""The thread that brings a run's journal to MLflow while training goes on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from plugins.loggers.delivery import METRICS_A_BATCH, Delivery, Point, is_refusal, one_line
from plugins.loggers.journal import Journal, decode
from plugins.loggers.tracking import check_store

SENT_FILE, _LOCK_FILE = ".mlflow_sent.json", ".mlflow_sender.lock"
_LONGEST_PAUSE = 15.0


class Busy(ConfigError):
    """Another process sends this run's journal."""


class Sender:
    """Sends records in order; a failure is tried again, with growing pauses, until it succeeds.

    How far it got is kept in a file beside the journal, written after each batch. That file may be behind the truth
    after a kill: what the journal held when a process starts, and each batch that failed, is asked for before it is
    sent again. All else goes without a question.

    Args:
        run_dir: folder of journal and run id.
        flush_seconds: longest time that a record waits while the server answers.

    Attributes:
        problem: why the last try failed; empty after a success.
        refused: why MLflow will never make this run; empty as long as it may.
        sent_points: metric values sent by this process.
    """

    def __init__(self, run_dir: Path, journal: Journal, uri: str, flush_seconds: float):
        self.run_dir = run_dir
        self.journal = journal
        self.uri = uri
        self.flush_seconds = flush_seconds
        self.delivery = Delivery(run_dir, uri)
        self.problem = ""
        self.sent_points = 0
        self.offset = self._load_offset()
        self._doubtful_until = journal.size
        self._doubt_from_next = True
        self._new_process = True
        self.refused = ""
        self._changed = threading.Condition()
        self._waiters = 0
        self._failures = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._lock_file: Any = None

    def start(self) -> None:
        """Begin to send, in a thread that a process may end without waiting for; nothing where it runs."""
        self._stopping = False
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._run, name="mlflow-sender", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Until all that is in the journal now was sent; False when that took longer than `seconds`."""
        self.journal.sync()
        end, give_up = self.journal.size, time.monotonic() + seconds
        with self._changed:
            self._waiters += 1
            self._changed.notify_all()
            while self.offset < end and not self.refused and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(min(left, 1.0))
            self._waiters -= 1
            return self.offset >= end and not self.journal.waiting

    def stop(self) -> None:
        """End the thread, unless it waits for an answer: then it ends with that, or with the process."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        if self._thread is None or not self._thread.is_alive():
            self._unlock()

    def pending(self) -> int:
        """Metric values in the journal that were not sent."""
        return sum(len(record.get("metrics", ())) for record, _ in self.journal.read(self.offset))

    # In the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                if self._failures:
                    check_store(self.uri, 5.0)  # quick to say no where MLflow's client would wait
                self.lock()
                self.adopt_or_renew()
                while not self._stopping and self.send_batch():
                    self._succeeded()
                self._succeeded()
            except Exception as error:
                self._failed(error)
            with self._changed:
                if not self._stopping and not (self._waiters and not self._failures and self._has_more()):
                    self._changed.wait(self._pause())

    def _pause(self) -> float:
        if not self._failures:
            return self.flush_seconds
        longest = 1.0 if self._waiters else _LONGEST_PAUSE
        return min(2.0 ** min(self._failures - 1, 10), longest) * (0.5 + random.random() / 2)

    def _has_more(self) -> bool:
        return self.offset < self.journal.size

    def send_batch(self) -> bool:
        """Send the next records: metrics up to MLflow's limit, or one of another kind. False when there are none."""
        if not self._has_more():
            return False
        self.journal.sync()  # whatever MLflow has must be here after a power cut, or a restart would log it again
        points, other, end = self._next()
        if self._doubt_from_next and points:
            self.delivery.doubt(points[0].time)
            self._doubt_from_next = False
        if points:
            self.delivery.metrics(points, doubtful=self.offset < self._doubtful_until)
            self.sent_points += len(points)
        elif other is not None:
            self.delivery.other(other)
        with self._changed:
            self.offset = end
            self._save_offset()
            self._changed.notify_all()
        return True

    def _next(self) -> tuple[list[Point], dict[str, Any] | None, int]:
        """(points, None, offset behind them) or ([], record, offset behind it)."""
        points: list[Point] = []
        end = self.offset
        for record, behind in self.journal.read(self.offset):
            if "metrics" not in record:
                return (points, None, end) if points else ([], record, behind)
            values = record["metrics"].items()
            if points and len(points) + len(values) > METRICS_A_BATCH:
                return points, None, end
            points += [Point(key, decode(value), record["time"], record["step"]) for key, value in values]
            end = behind
        return points, None, end if points else self.journal.size

    def adopt_or_renew(self) -> None:
        """Once, at the start: a run that the store does not know (another store, or deleted) is made anew, whole."""
        if self._new_process and self.delivery.run_id is not None and self.delivery.is_gone():
            warnings.warn(
                f"MLflow run {self.delivery.run_id} is not in {self.uri}; a new one gets all of {self.journal.path}",
                stacklevel=2,
            )
            self.delivery.forget_run()
            self.offset = 0
        self._new_process = False

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self.problem = one_line(error)
        self._doubtful_until, self._doubt_from_next = self.journal.size, True
        if self.delivery.run_id is None and is_refusal(error):
            self.refused = self.problem
        if self._failures == 1:
            warnings.warn(
                f"MLflow takes nothing at the moment, the run goes on and {self.journal.path} keeps it: {self.problem}",
                stacklevel=2,
            )

    def _succeeded(self) -> None:
        if self._failures:
            warnings.warn(
                f"MLflow is back after {self._failures} failed tries; what waited is being sent", stacklevel=2
            )
        self._failures, self.problem = 0, ""

    # Files -----------------------------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Become the only process that sends this journal; again and again is fine.

        Raises:
            Busy: another one does.
        """
        if self._lock_file is not None:
            return
        file = (self.run_dir / _LOCK_FILE).open("a")
        try:
            # Not flock: data loader workers would inherit it and hold it after their parent was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise Busy(f"another process sends {self.journal.path}") from None
        except OSError:  # a file system without locks
            pass
        self._lock_file = file
        self.offset = self._load_offset()

    def _unlock(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def _load_offset(self) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads((self.run_dir / SENT_FILE).read_text())
            if note["run_id"] == self.delivery.run_id and 0 <= note["bytes"] <= self.journal.size:
                return int(note["bytes"])
        return 0

    def _save_offset(self) -> None:
        path = self.run_dir / SENT_FILE
        with contextlib.suppress(OSError):  # a full disk: after a restart more is asked for, nothing else
            aside = path.with_suffix(".tmp")
            aside.write_text(json.dumps({"run_id": self.delivery.run_id, "bytes": self.offset}))
            aside.replace(path)
