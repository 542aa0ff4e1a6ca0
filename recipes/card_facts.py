"""What a model card is written from: a run's own record, and the files that other commands wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

NUMBER, MAYBE = (int, float), (int, float, type(None))  # JSON has null for what is no number
_ROLL_BACK = {"first_strike": int, "at_step": int, "to_step": int, "dropped": [[int, int]]}
PLAN: dict[str, Any] = {
    "parameters": {"total": NUMBER},
    "time_and_cost": {"seconds": NUMBER},
    "step": {"tokens_per_s": NUMBER, "mfu": NUMBER},
}
_FORECAST = {"forecast_id": str, "approach": object, "status": str, "loss": MAYBE, "low": MAYBE, "high": MAYBE}
FORECASTS: dict[str, Any] = {"rows": [{**_FORECAST, "measured": MAYBE}]}
SCORES: dict[str, Any] = {
    "text?": {"*": {"bits_per_byte": MAYBE, "loss": MAYBE, "tokens": MAYBE}},
    "questions?": {"*": {"exact_match": NUMBER, "interval": [NUMBER, NUMBER], "log_probability_per_byte": MAYBE}},
    "tasks?": {"*": {"questions": object}},
    "probes?": {"effective_length": {"*": {"holds_to": MAYBE, "falls_at": MAYBE}}},
    "contamination?": {"*": {"share": NUMBER, "texts": NUMBER, "too_short": NUMBER}},
}


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
    check(str(guard), backs, [_ROLL_BACK])
    gaps = [min(after - before, 600_000) for before, after in pairwise(times)]
    return RunFacts(
        run.resolve().name, params, last, sum(gaps) / 1000, tuple(backs), tags.get("scalewright.forecast_id", "")
    )


def check(what: str, value: Any, form: Any, path: str = "") -> None:
    """Compare what was read with the form in which it is written.

    Args:
        what: names it in the message.
        form: types; [form] of each item; [form, form] of just those; {key: form}, where "key?" may be missing and "*"
            is each key. What it does not name is not looked at.
        path: of `value` inside it.

    Raises:
        ConfigError: a figure is missing, or is none.
    """
    inside: list[tuple[str, Any, Any]] = []
    if isinstance(form, dict) and isinstance(value, dict):
        for key, inner in form.items():
            name = key.rstrip("?")
            if name not in value and name == key != "*":
                raise ConfigError(f"{what} is not as it was written: no {path}{key}; write it anew")
            inside += [(str(one), value[one], inner) for one in (value if key == "*" else {name} & value.keys())]
    elif isinstance(form, list) and isinstance(value, list) and len(form) in (1, len(value)):
        inside = [(str(i), item, form[min(i, len(form) - 1)]) for i, item in enumerate(value)]
    elif isinstance(form, dict | list) or not isinstance(value, form) or isinstance(value, bool):
        shown = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
        raise ConfigError(f"{what} is not as it was written: {path.rstrip('.') or 'it'} is {shown}; write it anew")
    for name, item, inner in inside:
        check(what, item, inner, f"{path}{name}.")


def read_values(path: Path | None, option: str, keys: Sequence[str], form: Any = object) -> Any:
    """What another command wrote as JSON; None for None.

    Args:
        keys: that it must have to be of that command at all.
        form: of the rest, see check.

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
    check(option, values, form)
    return values
