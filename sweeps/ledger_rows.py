"""The rows of the forecast ledger, read from MLflow; the rules of what counts are in `sweeps.ledger`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm.errors import ConfigError
from plugins.loggers.history import latest
from sweeps.forecast_record import (
    FORECAST_ID,
    LATE,
    OUTCOME,
    STATUS,
    TRAINING_RUN,
    all_experiments,
    first_loss_ms,
    is_training,
    prediction,
    search,
    whole,
    write_outcome,
)
from sweeps.mlflow_runs import KIND, client
from sweeps.scaling.table import LARGEST_LOSS

OPEN, RUNNING, STOPPED, INSIDE, OUTSIDE, DIVERGED, LATE_WORD = (
    "open", "running", "stopped", "inside", "outside", "diverged", "late",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One forecast.

    Attributes:
        forecast_id, experiment, approach: of the forecast. made_ms: when it was written, ms since 1970.
        budget: target FLOPs. n_params, d_tokens, c_flops: of the planned run.
        loss, low, high: predicted, nats per token, 95%.
        status: `open` (no run yet), `running`, `stopped` (ended unfinished, may go on), `inside`, `outside`, `diverged`
            (or given up: counts as outside), `late` (not scored).
        measured: loss of the run, NaN where there is none. error: measured / predicted - 1.
        forecast_run_id, training_run_id: in MLflow; the latter empty where there is none.
        ended_ms: when the run ended, ms since 1970; 0 before. recorded: the outcome is in MLflow.
        note: more, in words.
    """

    forecast_id: str
    experiment: str
    approach: str
    made_ms: int
    budget: float
    n_params: float
    d_tokens: float
    c_flops: float
    loss: float
    low: float
    high: float
    status: str
    measured: float
    forecast_run_id: str
    training_run_id: str
    ended_ms: int
    recorded: bool
    note: str = ""

    @property
    def error(self) -> float:
        return self.measured / self.loss - 1

    @property
    def scored(self) -> bool:
        """Whether it counts: decided, and made in time."""
        return self.status in (INSIDE, OUTSIDE, DIVERGED)


LEVEL = 0.95


def interval_score(low: float, high: float, measured: float, level: float = LEVEL) -> float:
    """Gneiting and Raftery 2007, equation 43: width, plus 2/alpha times how far outside; smaller is better."""
    alpha = 1 - level
    return (high - low) + 2 / alpha * (max(low - measured, 0.0) + max(measured - high, 0.0))


@dataclass(frozen=True)
class _Outcome:
    status: str
    measured: float = math.nan
    training_run_id: str = ""
    ended_ms: int = 0
    recorded: bool = False
    note: str = ""


def read_ledger(experiment: str | None = None, tracking_uri: str | None = None) -> list[Row]:
    """Every whole forecast of an experiment (None: of all), oldest first, held against its run. Writes nothing.

    Raises:
        ConfigError: no such experiment.
    """
    mlflow_client = client(tracking_uri)
    names = all_experiments(mlflow_client)
    wanted = [identity for identity, name in names.items() if experiment in (None, name)]
    if not wanted:
        raise ConfigError(f"MLflow has no experiment {experiment!r}; it has {', '.join(names.values()) or 'none'}")
    forecasts = _first_of_each(search(mlflow_client, wanted, f"tags.`{KIND}` = 'forecast'"))
    trained: dict[str, list[Any]] = {}
    for run in search(mlflow_client, list(names), f"tags.`{FORECAST_ID}` LIKE '%'"):
        if is_training(run):
            trained.setdefault(run.data.tags[FORECAST_ID], []).append(run)
    return [
        _row(run, names[run.info.experiment_id], _outcome(mlflow_client, run, trained.get(identity, [])))
        for identity, run in forecasts.items()
    ]


def _first_of_each(runs: Sequence[Any]) -> dict[str, Any]:
    """By forecast id: the first that was written whole. What a kill cut off has no status and is not counted."""
    first: dict[str, Any] = {}
    for run in runs:
        if whole(run):
            first.setdefault(run.data.tags.get(FORECAST_ID, run.info.run_id), run)
    return first


def _outcome(mlflow_client: Any, forecast: Any, runs: Sequence[Any]) -> _Outcome:
    """What became of a forecast; `runs` are those trained for it, oldest first."""
    tags, metrics = forecast.data.tags, forecast.data.metrics
    if OUTCOME in tags or "inside" in metrics:
        word = tags.get(OUTCOME) or (INSIDE if metrics["inside"] else OUTSIDE)
        note = tags.get("scalewright.reason", "")
        return _Outcome(word, metrics.get("loss", math.nan), tags.get(TRAINING_RUN, ""), recorded=True, note=note)
    decided = [outcome for run in runs if (outcome := _ended(mlflow_client, forecast, run)) is not None]
    if decided:
        more = f"{len(decided) - 1} later runs of it are not counted" if len(decided) > 1 else ""
        first = decided[0]
        status = LATE_WORD if LATE in tags else first.status
        return replace(first, status=status, note=first.note or more)
    if LATE in tags:
        return _Outcome(LATE_WORD, training_run_id=runs[-1].info.run_id if runs else "")
    if not runs:
        return _Outcome(OPEN)
    return _Outcome(RUNNING if runs[-1].info.status == "RUNNING" else STOPPED, training_run_id=runs[-1].info.run_id)


def _ended(mlflow_client: Any, forecast: Any, run: Any) -> _Outcome | None:
    """A run's verdict; None while it runs or can go on."""
    diverged = run.data.tags.get(STATUS) == "diverged"
    if not diverged and run.info.status != "FINISHED":
        return None
    measured = latest(mlflow_client, run).get("val_loss", math.nan)
    if not math.isfinite(measured) or abs(measured) >= LARGEST_LOSS:
        if not diverged and "val_loss" not in run.data.metrics:
            return None  # finished without a validation: nothing to hold against
        diverged, measured = True, math.nan
    predicted = prediction(forecast)
    status = DIVERGED if diverged else INSIDE if predicted["loss_lo"] <= measured <= predicted["loss_hi"] else OUTSIDE
    began, note = first_loss_ms(mlflow_client, run), ""
    if 0 < began < forecast.info.start_time:
        status, note = LATE_WORD, "the run had logged a loss before the forecast was written"
    return _Outcome(status, measured, run.info.run_id, int(run.info.end_time or 0), note=note)


def _row(forecast: Any, experiment: str, outcome: _Outcome) -> Row:
    metrics, predicted = forecast.data.metrics, prediction(forecast)
    value = {name: metrics.get(name, math.nan) for name in ("budget", "n_params", "d_tokens", "c_flops")}
    return Row(
        forecast.data.tags.get(FORECAST_ID, ""), experiment, forecast.data.params.get("approach", ""),
        forecast.info.start_time, **value,
        loss=predicted["loss"], low=predicted["loss_lo"], high=predicted["loss_hi"],
        forecast_run_id=forecast.info.run_id, **vars(outcome),
    )  # fmt: skip


def settle(rows: Sequence[Row], tracking_uri: str | None = None) -> int:
    """Writes what was decided to the forecasts' MLflow runs, and links those whose run exists; how many were decided.

    A kill in between leaves some for the next call. Times are those of the training runs, so a repeated write is the
    same write.
    """
    mlflow_client = client(tracking_uri)
    new = [row for row in rows if not row.recorded and row.ended_ms and row.status not in (OPEN, RUNNING, STOPPED)]
    for row in new:
        metrics = {"loss": row.measured, "error": row.error} if math.isfinite(row.measured) else {}
        if row.scored:
            metrics["inside"] = float(row.status == INSIDE)
        if row.scored and metrics.keys() >= {"loss"}:
            metrics["interval_score"] = interval_score(row.low, row.high, row.measured)
        write_outcome(mlflow_client, row.forecast_run_id, row.status, metrics, row.training_run_id, row.ended_ms)
    for row in rows:
        if row.status in (RUNNING, STOPPED):
            mlflow_client.set_tag(row.forecast_run_id, TRAINING_RUN, row.training_run_id)
    return len(new)


def give_up(rows: Sequence[Row], forecast_id: str, reason: str, tracking_uri: str | None = None) -> None:
    """Closes a forecast whose run will never finish: it counts as outside, without a loss.

    Raises:
        ConfigError: no such forecast, or its outcome is known.
    """
    row = next((row for row in rows if row.forecast_id == forecast_id), None)
    if row is None:
        raise ConfigError(f"no forecast {forecast_id} here; it is one of {', '.join(r.forecast_id for r in rows)}")
    if row.status not in (OPEN, RUNNING, STOPPED):
        raise ConfigError(f"forecast {forecast_id} is {row.status} already; an outcome stays as it was")
    mlflow_client = client(tracking_uri)
    mlflow_client.set_tag(row.forecast_run_id, "scalewright.reason", reason or "given up")
    write_outcome(mlflow_client, row.forecast_run_id, DIVERGED, {"inside": 0.0}, row.training_run_id, row.made_ms)
