"""A finished run held against the forecast that was made for it."""

from __future__ import annotations

import html
import json
import math
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from lm.config import ModelConfig, MuPConfig
from lm.errors import ConfigError
from plugins.loggers.delivery import run_id_of
from plugins.loggers.history import latest
from sweeps.forecast_record import Check
from sweeps.forecasting import Forecast
from sweeps.ledger_rows import LATE_WORD, read_ledger
from sweeps.mlflow_runs import client
from sweeps.report_page import Section
from sweeps.report_tables import table


def read_decision(folder: Path) -> dict[str, Any]:
    """forecast.json of a folder made by sweeps.decide.

    Raises:
        ConfigError: there is none, or it is another file.
    """
    path = folder / "forecast.json"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no decision (no forecast.json): run python -m sweeps.decide --out {folder}")
    try:
        decision = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); make it anew with sweeps.decide") from None
    needed = {*(f.name for f in fields(Forecast) if f.default is MISSING), "flags", "experiment", "sweep", "run"}
    missing = sorted(needed - decision.keys() if isinstance(decision, dict) else needed)
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: it is not what sweeps.decide writes; run that first")
    return decision


def as_forecast(decision: dict[str, Any]) -> Forecast:
    """The Forecast that sweeps.decide wrote down."""
    values = {f.name: decision[f.name] for f in fields(Forecast) if f.name in decision}
    values["flags"] = tuple(decision["flags"])
    if decision["model"] is not None:
        model = dict(decision["model"])
        if model.get("mup") is not None:
            model["mup"] = MuPConfig(**model["mup"])
        values["model"] = ModelConfig(**model)
    return Forecast(**values)


def measured(run_dir: Path) -> tuple[str, dict[str, float]]:
    """(MLflow run id, newest metrics) of a finished run.

    Raises:
        ConfigError: there is no such run, or it has not finished.
    """
    run_id = run_id_of(run_dir)
    if run_id is None:
        raise ConfigError(f"{run_dir} holds no run yet: python -m recipes.pretrain fit --config ... first")
    mlflow_client = client()
    run = mlflow_client.get_run(run_id)
    if run.info.status != "FINISHED" or "val_loss" not in run.data.metrics:
        raise ConfigError(f"the run in {run_dir} is {run.info.status}: finish it with --ckpt_path last")
    return run_id, latest(mlflow_client, run)


def is_late(forecast_id: str, experiment: str) -> bool:
    """Whether the ledger says that the run had logged a loss before its forecast was written."""
    return any(row.forecast_id == forecast_id and row.status == LATE_WORD for row in read_ledger(experiment))


def outcome_section(forecast: Forecast, outcome: Check, metrics: dict[str, float], late: bool = False) -> Section:
    """The comparison, the forecast as it was written, and the run's loss by source.

    Args:
        late: the forecast was written after the run had logged a loss, and proves nothing.
    """
    word = "inside" if outcome.inside else "outside"
    by_source = sorted(name for name in metrics if name.startswith("val_loss/"))
    rows = []
    for name in by_source:
        bits = metrics.get(name.replace("val_loss", "bpb"), math.nan)
        rows.append([name.removeprefix("val_loss/"), f"{metrics[name]:.4f}", f"{bits:.4f}"])
    sources = table(["source", "nats per token", "bits per byte"], rows) if rows else ""
    box = "good" if outcome.inside and not late else "bad"
    when = "after the run had shown a loss: it is late, and not scored" if late else "before the run"
    return Section(
        "Forecast and outcome",
        f'<div class="box {box}"><p><b>The measured loss is <span class="{word}">{word} '
        f"the interval</span> that was written down {when}.</b></p><p>{html.escape(outcome.text)}</p></div>"
        f"<pre>{html.escape(forecast.text())}</pre>{sources}",
    )
