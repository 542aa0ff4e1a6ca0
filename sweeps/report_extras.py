"""What an MLflow experiment holds beside the sweep's cells, as sections of the report: learning rates, forecasts."""

from __future__ import annotations

import base64
import html
import json
import math
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sweeps import report_tables as tables
from sweeps.fit_report import quantity
from sweeps.ledger_plot import plot_ledger
from sweeps.ledger_rows import Row, read_ledger
from sweeps.ledger_score import ledger_text
from sweeps.lr_report import FIGURE, NAMES, NUMBERS
from sweeps.mlflow_runs import KIND, client, search_all
from sweeps.plots import Marker
from sweeps.report_page import Extras, Section, figure_grid
from sweeps.report_words import power


def extras_of(
    experiment: str | None,
    title: str,
    first: tuple[Section, ...] = (),
    markers: Sequence[Marker] = (),
    tracking_uri: str | None = None,
) -> Extras:
    """Sections for a page.

    Args:
        experiment: MLflow experiment to look in; None for a CSV, which holds runs only.
        first: sections before the decision.
    """
    if experiment is None:
        return Extras(title, first, (), tuple(markers))
    found = [lr_section(experiment, tracking_uri), ledger_section(experiment, tracking_uri)]
    return Extras(title, first, tuple(section for section in found if section), tuple(markers))


def lr_section(experiment: str, tracking_uri: str | None = None) -> Section | None:
    """The newest learning-rate sweep's verdict, table and figure; None where the experiment has none."""
    mlflow_client = client(tracking_uri)
    fits = search_all(mlflow_client, experiment, f"tags.`{KIND}` = 'fit' and params.approach = 'lr_quadratic'")
    if not fits:
        return None
    with tempfile.TemporaryDirectory() as place:
        run_id = fits[0].info.run_id
        numbers = json.loads(Path(mlflow_client.download_artifacts(run_id, NUMBERS, place)).read_text())
        drawn = Path(mlflow_client.download_artifacts(run_id, FIGURE, place)).read_bytes()
    verdict = "".join(f"<li>{html.escape(line)}</li>" for line in numbers["verdict"])
    header = ["parametrisation", "batch, tokens", "width", "LR*", "95%", "loss there"]
    rows = [_optimum(optimum) for optimum in numbers["optima"]]
    caption = "Loss against learning rate, a curve a width. Under muP the minima should stand above each other."
    left = "".join(f"<li>{html.escape(f'{run}: {why}')}</li>" for run, why in numbers["excluded"])
    gone = f"<details><summary>Runs left out</summary><ul>{left}</ul></details>" if left else ""
    figure = png(drawn, "Loss against learning rate by width")
    content = f"<ul>{verdict}</ul>" + figure_grid([(figure, caption)]) + tables.table(header, rows) + gone
    return Section("Learning-rate transfer", content)


def _optimum(o: dict[str, Any]) -> list[str]:
    head = [NAMES.get(o["param"], o["param"]), f"{o['batch_tokens']:,}", str(o["width"])]
    if o["lr"] is None:
        return [*head, "refused", o["reason"], "–"]
    ends = f"{o['low']:.2e} to {o['high']:.2e}" if o["low"] is not None else "none"
    return [*head, f"{o['lr']:.2e}", ends, f"{o['loss']:.4f}"]


def ledger_section(experiment: str, tracking_uri: str | None = None) -> Section | None:
    """Every forecast of the experiment with its outcome, and the score; None where there are none."""
    rows = read_ledger(experiment, tracking_uri)
    if not rows:
        return None
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "ledger.png"
        plot_ledger(rows, path)
        figure = png(path.read_bytes(), "Forecasts against measurements")
    header = ["forecast", "made", "FLOPs", "N", "predicted (95%)", "measured", "off", "outcome"]
    caption = "Each forecast was written down before its run; the bars are its 95% interval."
    score = ledger_text(rows).partition("\n\n")[2]
    content = (
        f"<pre>{html.escape(score)}</pre>"
        + tables.table(header, [_forecast(row) for row in rows])
        + figure_grid([(figure, caption)])
    )
    return Section("Forecasts", content)


def _forecast(row: Row) -> list[str]:
    made = datetime.fromtimestamp(row.made_ms / 1000, UTC).strftime("%Y-%m-%d")
    known = math.isfinite(row.measured)
    return [
        row.forecast_id, made, power(row.c_flops), quantity(row.n_params),
        f"{row.loss:.3f} ({row.low:.3f} to {row.high:.3f})", f"{row.measured:.3f}" if known else "–",
        f"{row.error:+.2%}" if known else "–", row.status + (f" ({row.note})" if row.note else ""),
    ]  # fmt: skip


def png(content: bytes, title: str) -> str:
    """An img element that holds its picture."""
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'
