"""Forecasts in MLflow: written down before the run, linked to it both ways, held against it afterwards.

A forecast is a run of kind `forecast`. It is whole once it carries scalewright.status = complete, which is written
after its numbers: what a kill cut off is not counted, and the same forecast is then written again. Its id is a hash of
what it was made from, so a repeated command finds the first one, and the first one stands. The prediction is in params,
which MLflow never changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from plugins.loggers import tracking
from sweeps.forecasting import Forecast
from sweeps.mlflow_runs import KIND, client, log_run
from sweeps.plots import Marker


@dataclass(frozen=True)
class Check:
    """A forecast held against the run. relative_error: measured / predicted - 1."""

    inside: bool
    relative_error: float
    measured: float
    text: str


def check(forecast: Forecast, measured_loss: float) -> Check:
    """Inside the interval or not, and by how much the forecast missed."""
    error = measured_loss / forecast.loss - 1
    inside = forecast.loss_lo <= measured_loss <= forecast.loss_hi
    where = "inside" if inside else "OUTSIDE"
    text = (
        f"measured {measured_loss:.3f}, forecast {forecast.loss:.3f} [{forecast.loss_lo:.3f}, {forecast.loss_hi:.3f}]:"
        f" {where} the 95% interval, {error:+.2%} off"
    )
    return Check(inside, error, measured_loss, text)


def markers(forecast: Forecast, measured_loss: float | None = None) -> list[Marker]:
    """The forecast, and the measurement when there is one, for `plots.plot_all`."""
    where = (forecast.c_flops, forecast.n_params, forecast.d_tokens)
    points = [Marker("forecast, 95%", *where, forecast.loss, forecast.loss_lo, forecast.loss_hi)]
    return points if measured_loss is None else [*points, Marker("measured", *where, measured_loss)]


FORECAST_ID, TRAINING_RUN, LATE, OUTCOME = (
    "scalewright.forecast_id", "scalewright.training_run_id", "scalewright.late", "scalewright.outcome",
)  # fmt: skip
STATUS = "scalewright.status"
PREDICTION = ("loss", "loss_lo", "loss_hi")
# What a training run logs once it has learnt anything about its loss.
_LOSSES = ("loss", "val_loss", "train_loss")


def log_forecast(
    forecast: Forecast,
    experiment: str,
    parent_run_id: str | None = None,
    tracking_uri: str | None = None,
    training_run_id: str = "",
    late: bool = False,
) -> Forecast:
    """Writes the forecast to MLflow as its own run (kind `forecast`); call it before the training run starts.

    Give the training run the tag `scalewright.forecast_id = forecast.forecast_id` when it starts, or name the run here
    if it is there already: the two are linked both ways.

    Args:
        training_run_id: a run that was created but has not trained yet; it gets the tag.
        late: write the forecast of a run that has logged a loss too, marked, never scored.

    Returns:
        The forecast with its MLflow run. When the same one was written before, that one, with its numbers.

    Raises:
        ConfigError: the run it is for has logged a loss already, and `late` is not set.
    """
    mlflow_client = client(tracking_uri)
    first = _written(mlflow_client, experiment, forecast.forecast_id)
    if first is None:
        begun = [
            run
            for run in _runs_of(mlflow_client, forecast.forecast_id, training_run_id)
            if first_loss_ms(mlflow_client, run)
        ]
        if begun and not late:
            raise ConfigError(
                f"run {begun[0].info.run_id} has logged a loss already: a forecast of it would be none. Forecast"
                " before the run starts, or write this one down as late, which is never scored (--late)"
            )
        run_id = _write(forecast, experiment, parent_run_id, tracking_uri, bool(begun))
    else:
        run_id, stands = first.info.run_id, prediction(first)
        forecast = replace(forecast, loss=stands["loss"], loss_lo=stands["loss_lo"], loss_hi=stands["loss_hi"])
    if training_run_id:
        mlflow_client.set_tag(training_run_id, FORECAST_ID, forecast.forecast_id)
        mlflow_client.set_tag(run_id, TRAINING_RUN, training_run_id)
    return replace(forecast, mlflow_run_id=run_id)


def _write(forecast: Forecast, experiment: str, parent_run_id: str | None, tracking_uri: str | None, late: bool) -> str:
    numbers = (
        "n_opt", "n_lo", "n_hi", "d_opt", "d_lo", "d_hi", "n_params", "d_tokens", "c_flops", "loss_lo", "loss_hi",
        "holdout_err",
    )  # fmt: skip
    metrics = {name: float(getattr(forecast, name)) for name in numbers}
    metrics |= {"loss_pred": forecast.loss, "budget": forecast.budget}
    params: dict[str, Any] = {"approach": forecast.approach, "budget_flops": forecast.budget}
    params |= {f"predicted.{name}": repr(float(getattr(forecast, name))) for name in PREDICTION}
    params |= {"flops_convention": forecast.flops_convention, "n_convention": forecast.n_convention}
    params |= {f"model.{key}": value for key, value in (asdict(forecast.model) if forecast.model else {}).items()}
    params["flags"] = "; ".join(forecast.flags) or "none"
    tags = {KIND: "forecast", FORECAST_ID: forecast.forecast_id} | ({LATE: "true"} if late else {})
    finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
    return log_run(
        experiment, f"forecast-{forecast.forecast_id}", tags, params, finite, (), parent_run_id, tracking_uri,
        f"```\n{forecast.text()}\n```",
    )  # fmt: skip


def prediction(run: Any) -> dict[str, float]:
    """loss, loss_lo, loss_hi of a forecast's run; forecasts of earlier versions have them as metrics only."""
    params, metrics = run.data.params, run.data.metrics
    old = {"loss": "loss_pred"}
    return {
        name: float(params.get(f"predicted.{name}", metrics.get(old.get(name, name), math.nan))) for name in PREDICTION
    }


def whole(run: Any) -> bool:
    """Whether a forecast's run was written to its end."""
    return bool(run.data.tags.get(STATUS) == "complete")


def search(mlflow_client: Any, experiment_ids: Sequence[str], query: str) -> list[Any]:
    """Every run of these experiments that the query finds, oldest first."""
    return tracking.search_runs(mlflow_client, experiment_ids, query, tracking.OLDEST)


def all_experiments(mlflow_client: Any) -> dict[str, str]:
    """Names by id."""
    found: dict[str, str] = {}
    token = None
    while True:
        page = mlflow_client.search_experiments(max_results=500, page_token=token)
        found |= {experiment.experiment_id: experiment.name for experiment in page}
        token = page.token
        if not token:
            return found


def _written(mlflow_client: Any, experiment: str, forecast_id: str) -> Any:
    """The run of a forecast that was written before: the first whole one."""
    found = mlflow_client.get_experiment_by_name(experiment)
    if found is None:
        return None
    query = f"tags.`{KIND}` = 'forecast' and tags.`{FORECAST_ID}` = '{forecast_id}'"
    return next((run for run in search(mlflow_client, [found.experiment_id], query) if whole(run)), None)


def _runs_of(mlflow_client: Any, forecast_id: str, training_run_id: str) -> list[Any]:
    """Training runs that a forecast is for, in any experiment."""
    query = f"tags.`{FORECAST_ID}` = '{forecast_id}'"
    runs = [run for run in search(mlflow_client, list(all_experiments(mlflow_client)), query) if is_training(run)]
    if training_run_id and training_run_id not in [run.info.run_id for run in runs]:
        runs.append(mlflow_client.get_run(training_run_id))
    return runs


def is_training(run: Any) -> bool:
    """Whether a run that names a forecast is the one it is for."""
    return bool(run.data.tags.get(KIND) != "forecast")


def first_loss_ms(mlflow_client: Any, run: Any) -> int:
    """When a run logged its first loss, ms since 1970; 0 when it has none."""
    times = [
        point.timestamp
        for key in _LOSSES
        if key in run.data.metrics
        for point in mlflow_client.get_metric_history(run.info.run_id, key)
    ]
    return min(times, default=0)


def log_outcome(
    forecast: Forecast,
    measured_loss: float,
    training_run_id: str = "",
    tracking_uri: str | None = None,
    figures: Sequence[Path] = (),
) -> Check:
    """Adds the measured loss, the error, inside (1 or 0) and figures to the forecast's run, once.

    A forecast whose outcome is written already, or that is marked late, keeps what it has.

    Raises:
        ValueError: the forecast was not logged before.
    """
    if not forecast.mlflow_run_id:
        raise ValueError(
            f"forecast {forecast.forecast_id} was never written to MLflow; call log_forecast before the run"
        )
    outcome = check(forecast, measured_loss)
    mlflow_client = client(tracking_uri)
    tags = mlflow_client.get_run(forecast.mlflow_run_id).data.tags
    if OUTCOME in tags or LATE in tags:
        return outcome
    for path in figures:
        mlflow_client.log_artifact(forecast.mlflow_run_id, str(path))
    metrics = {"loss": measured_loss, "error": outcome.relative_error, "inside": float(outcome.inside)}
    word = "inside" if outcome.inside else "outside"
    write_outcome(mlflow_client, forecast.mlflow_run_id, word, metrics, training_run_id, int(time.time() * 1000))
    return outcome


def write_outcome(
    mlflow_client: Any, run_id: str, outcome: str, metrics: Mapping[str, float], training_run_id: str, time_ms: int
) -> None:
    """Numbers first, the tag that makes them count last; the same call again, cut off or not, changes nothing."""
    from mlflow.entities import Metric, RunTag

    tags = {TRAINING_RUN: training_run_id} if training_run_id else {}
    mlflow_client.log_batch(
        run_id,
        metrics=[Metric(key, value, time_ms, 0) for key, value in metrics.items()],
        tags=[RunTag(key, value) for key, value in (tags | {OUTCOME: outcome}).items()],
    )
