"""Which points of a run count, when steps were done more than once.

A run that restarts from an older checkpoint, or that is rolled back, does steps again. Then

- a point that says the same again is not logged again: each (metric, step) is there once;
- points that a roll-back left behind belong to an abandoned branch. MLflow cannot delete them; the run's tag
  scalewright.rewinds says which they are, and of two points at one step the later one counts. `curve` reads it so.

No MLflow is imported here; clients are handed in.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plugins.loggers.journal import Journal, decode

REWINDS = "scalewright.rewinds"
# A restart repeats the losses of the steps it does again, to the last bit or, on another layout, but for rounding. A
# larger difference means that something else was changed: from there on it is another branch.
_SAME_LOSS = 1e-3
_COMPARED = ("loss", "val_loss")


class History:
    """What was logged at steps that may come again, rebuilt from the journal at a restart.

    Attributes:
        clock_ms: newest time in the journal; no later point may have an older one.
        status: newest status in the journal.
        points: metric values in the journal.
    """

    def __init__(self, journal: Journal):
        self.clock_ms = 0
        self.status = ""
        self.points = 0
        self._keys: dict[int, frozenset[str]] = {}
        self._sets: dict[frozenset[str], frozenset[str]] = {}  # one object for all steps with the same metrics
        self._losses: dict[tuple[str, int], float] = {}
        self._repeated: tuple[int, dict[str, float]] = (-1, {})
        for record, _ in journal.read():
            self.clock_ms = max(self.clock_ms, int(record.get("time", 0)))
            if "metrics" in record:
                self.add(record["step"], {key: decode(value) for key, value in record["metrics"].items()})
            elif record.get("do") == "rewind":
                self.rewind(record["step"])
            elif record.get("do") == "status":
                self.status = record["status"]

    def now_ms(self) -> int:
        """The time, never before that of an earlier point, whatever the clocks of a run's machines say."""
        self.clock_ms = max(self.clock_ms, int(time.time() * 1000))
        return self.clock_ms

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remember points."""
        self.points += len(metrics)
        keys = self._keys.get(step, frozenset()).union(metrics)
        self._keys[step] = self._sets.setdefault(keys, keys)
        self._losses.update({(key, step): metrics[key] for key in _COMPARED if key in metrics})

    def new(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those that were not logged at this step before. Steps before it are forgotten: time goes forward."""
        for old in [known for known in self._keys if known < step]:
            del self._keys[old]
            for key in _COMPARED:
                self._losses.pop((key, old), None)
        known = self._keys.get(step, frozenset())
        repeated = {key: value for key, value in metrics.items() if key in known}
        if repeated:
            before = self._repeated[1] if self._repeated[0] == step else {}
            self._repeated = (step, {**before, **repeated})
        return {key: value for key, value in metrics.items() if key not in known}

    def contradiction(self, step: int, metrics: Mapping[str, float]) -> str:
        """Why this is another branch than the one logged at this step before; empty where it is not."""
        for key in _COMPARED:
            old = self._losses.get((key, step))
            if old is not None and key in metrics and not _same(old, metrics[key]):
                return f"{key} at step {step} was {old:.6g} and is {metrics[key]:.6g}"
        return ""

    def repeated(self, step: int) -> dict[str, float]:
        """What `new` held back at this step."""
        return self._repeated[1] if self._repeated[0] == step else {}

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`; later points are newer than now."""
        self.clock_ms += 1
        self._keys = {known: keys for known, keys in self._keys.items() if known <= step}
        self._losses = {(key, known): value for (key, known), value in self._losses.items() if known <= step}


def _same(a: float, b: float) -> bool:
    if math.isfinite(a) and math.isfinite(b):
        return math.isclose(a, b, rel_tol=_SAME_LOSS)
    return a == b or (math.isnan(a) and math.isnan(b))


def rewinds_of(tags: Mapping[str, str]) -> list[tuple[int, int]]:
    """(step, time in ms) of each roll-back of a run, from its tags."""
    return [(int(step), int(time_ms)) for step, time_ms in json.loads(tags.get(REWINDS, "[]"))]


def live(points: Iterable[Any], rewinds: Sequence[tuple[int, int]]) -> list[Any]:
    """The points that count, one a step, ascending.

    Args:
        points: of one metric, with step and timestamp in ms (mlflow.entities.Metric).
        rewinds: see rewinds_of. Points after its step that are not newer than it are abandoned.
    """
    newest: dict[int, Any] = {}
    for point in points:
        if any(point.step > step and point.timestamp <= time_ms for step, time_ms in rewinds):
            continue
        if point.step not in newest or point.timestamp >= newest[point.step].timestamp:
            newest[point.step] = point
    return [newest[step] for step in sorted(newest)]


def curve(client: Any, run_id: str, key: str) -> dict[int, float]:
    """{step: value} of a metric as it counts, ascending.

    Args:
        client: an MlflowClient.
    """
    rewinds = rewinds_of(client.get_run(run_id).data.tags)
    return {point.step: point.value for point in live(client.get_metric_history(run_id, key), rewinds)}


def latest(client: Any, run: Any) -> dict[str, float]:
    """Newest value of each metric of a run as it counts; MLflow's own is that of the highest step, abandoned or not.

    Args:
        client: an MlflowClient.
        run: as a search returns it.
    """
    rewinds = rewinds_of(run.data.tags)
    if not rewinds:
        return dict(run.data.metrics)
    values: dict[str, float] = {}
    for key in run.data.metrics:
        points = live(client.get_metric_history(run.info.run_id, key), rewinds)
        if points:
            values[key] = points[-1].value
    return values
