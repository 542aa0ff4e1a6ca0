"""Holds a finished run against the forecast that was made for it, and writes a report: one HTML file, no outside links.

Examples:
    python -m sweeps.report --decision runs/demo                 the folder that sweeps.decide wrote
    python -m sweeps.report --decision runs/demo --runs-dir /scratch/runs

Writes outcome.json, isoflop.png, scaling.png and report.html into the folder, and the outcome to the forecast's MLflow
run: measured loss, relative error, inside (1 or 0).
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.config import ModelConfig, MuPConfig
from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from sweeps.files import write_text
from sweeps.fit import fit_experiment
from sweeps.fit_report import FitReport
from sweeps.forecast import Check, Forecast, check, log_outcome, markers
from sweeps.plots import plot_all
from sweeps.records import client

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f6f6f4; padding: 1rem; overflow-x: auto; font-size: 13px; line-height: 1.45; }
img { max-width: 100%; } h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.inside { color: #17643a; } .outside { color: #a3261b; }
"""


def report(folder: Path, runs_dir: Path) -> tuple[Check, dict[str, float]]:
    """Compare, log and write; see the module's text.

    Returns:
        The comparison, and the run's newest metrics.

    Raises:
        ConfigError: no decision in the folder, or its run is not finished.
        ValueError: the sweep can no longer be read or fitted.
    """
    decision = read_decision(folder)
    forecast = as_forecast(decision)
    run_id, metrics = measured(runs_dir / decision["run"])
    fit = fit_experiment(f"mlflow:{decision['experiment']}", budgets=[forecast.budget], parent_run_id=decision["sweep"])
    outcome = check(forecast, metrics["val_loss"])
    figures = plot_all(fit.analysis, folder, markers(forecast, metrics["val_loss"]))
    if not (folder / "outcome.json").exists():
        log_outcome(forecast, metrics["val_loss"], run_id, figures=figures)
    content = {"inside": outcome.inside, "relative_error": outcome.relative_error, "run_id": run_id, **metrics}
    write_text(folder / "outcome.json", json.dumps(content, indent=1))
    write_text(folder / "report.html", page(fit, forecast, outcome, metrics, figures))
    return outcome, metrics


def read_decision(folder: Path) -> dict[str, Any]:
    """forecast.json of a folder made by sweeps.decide."""
    path = folder / "forecast.json"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no decision (no forecast.json): run python -m sweeps.decide --out {folder}")
    return json.loads(path.read_text())


def as_forecast(decision: dict[str, Any]) -> Forecast:
    """The Forecast that sweeps.decide wrote down."""
    values = {name: decision[name] for name in Forecast.__dataclass_fields__}
    model = dict(decision["model"])
    if model.get("mup") is not None:
        model["mup"] = MuPConfig(**model["mup"])
    return Forecast(**{**values, "model": ModelConfig(**model), "flags": tuple(decision["flags"])})


def measured(run_dir: Path) -> tuple[str, dict[str, float]]:
    """(MLflow run id, newest metrics) of a finished run.

    Raises:
        ConfigError: there is no such run, or it has not finished.
    """
    note = run_dir / "mlflow_run_id"
    if not note.is_file():
        raise ConfigError(f"{run_dir} holds no run yet: python -m recipes.pretrain fit --config ... first")
    run = client().get_run(note.read_text().strip())
    if run.info.status != "FINISHED" or "val_loss" not in run.data.metrics:
        raise ConfigError(f"the run in {run_dir} is {run.info.status}: finish it with --ckpt_path last")
    return run.info.run_id, dict(run.data.metrics)


def page(fit: FitReport, forecast: Forecast, outcome: Check, metrics: dict[str, float], figures: Sequence[Path]) -> str:
    """The report as HTML."""
    word = "inside" if outcome.inside else "outside"
    by_source = sorted(name for name in metrics if name.startswith("val_loss/"))
    rows = [
        f"{name.removeprefix('val_loss/'):<16}{metrics[name]:>10.4f} nats per token"
        f"{metrics.get(name.replace('val_loss', 'bpb'), float('nan')):>10.4f} bits per byte"
        for name in by_source
    ]
    images = "\n".join(
        f'<img alt="{figure.stem}" src="data:image/png;base64,{base64.b64encode(figure.read_bytes()).decode()}">'
        for figure in figures
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>scalewright: forecast and outcome</title>
<style>{_STYLE}</style></head><body>
<h1>Forecast and outcome: <span class="{word}">{word} the interval</span></h1>
<p>{html.escape(outcome.text)}</p>
<h2>The forecast, written before the run</h2><pre>{html.escape(forecast.text())}</pre>
<h2>The run, by source</h2><pre>{html.escape(chr(10).join(rows))}</pre>
<h2>The fit</h2><pre>{html.escape(fit.text())}</pre>
{images}
</body></html>
"""


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.report`."""
    p = command_parser("sweeps.report", __doc__)
    p.add_argument("--decision", type=Path, required=True, metavar="DIR", help="folder made by sweeps.decide")
    p.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of all training runs")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a report, also when the forecast missed; 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments))


def _command(arguments: argparse.Namespace) -> None:
    outcome, _ = report(arguments.decision, arguments.runs_dir)
    print(outcome.text)
    print(f"report: {arguments.decision / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
