"""What a model card is written from: a run's own record, and the files that other commands wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lm.errors import ConfigError


@dataclass(frozen=True)
class RunFacts:
    """What a run's own record says.

    Attributes:
        name: of the run.
        params: as its logger got them; the newest of a name counts.
        last: newest value of each metric, with its step.
        seconds: between the first and the last record, pauses of over 10 minutes between restarts left out.
        roll_backs: of the spike guard.
        forecast_id: tag that links the run to its forecast; empty for none.
    """

    name: str
    params: dict[str, Any]
    last: dict[str, tuple[int, float]]
    seconds: float
    roll_backs: tuple[dict[str, Any], ...]
    forecast_id: str


def read_run(run: Path) -> RunFacts:
    """The facts of a run's folder.

    Raises:
        ConfigError: it is no run's folder, or it kept no record (trainer.logger was off).
    """
    from plugins.loggers.journal import FILE, Journal, decode

    if not (run / "config.yaml").is_file():
        raise ConfigError(f"--run {run} has no config.yaml: it is no run's folder")
    if not (run / FILE).is_file():
        raise ConfigError(f"--run {run} has no {FILE}: the run kept no record of its metrics (trainer.logger)")
    params: dict[str, Any] = {}
    tags: dict[str, str] = {}
    last: dict[str, tuple[int, float]] = {}
    times: list[int] = []
    for record, _ in Journal(run / FILE).read():
        times.append(record["time"])
        if "metrics" in record:
            last |= {key: (record["step"], decode(value)) for key, value in record["metrics"].items()}
        params |= record.get("params", {})
        tags |= record.get("tags", {})
    guard = run / "spike_guard.json"
    backs = read_values(guard, "spike guard", ["roll_backs"])["roll_backs"] if guard.is_file() else []
    gaps = [min(after - before, 600_000) for before, after in pairwise(times)]
    return RunFacts(
        run.resolve().name, params, last, sum(gaps) / 1000, tuple(backs), tags.get("scalewright.forecast_id", "")
    )


@contextmanager
def as_written(what: str) -> Iterator[None]:
    """Around what is said of a file that another command wrote: what cannot be said is the file's fault.

    Raises:
        ConfigError: a value is missing, or is of another kind.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{what} is not as it was written: {said}; write it anew") from None


def read_values(path: Path | None, option: str, keys: Sequence[str]) -> Any:
    """What another command wrote as JSON; None for None.

    Args:
        keys: that it must have to be of that command at all.

    Raises:
        ConfigError: it cannot be read, or is not what that command writes.
    """
    if path is None:
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {path} is not JSON: {error}") from None
    if not isinstance(values, dict) or any(key not in values for key in keys):
        raise ConfigError(f"{option} {path} has no {' or no '.join(keys)}: see python -m recipes.card --help")
    return values
