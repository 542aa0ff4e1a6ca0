"""One HTML file, without outside links, of what a sweep says: decision, fits, figures, exclusions, forecasts.

Of runs, from MLflow or a CSV, with the options of sweeps.fit; or of the folder that sweeps.decide wrote, where it also
holds the finished run against the forecast and writes outcome.json, isoflop.png, scaling.png and the outcome to the
forecast's MLflow run: measured loss, relative error, inside (1 or 0).

Examples:
    python -m sweeps.report --runs mlflow:scalewright-demo --budget 3.6e12 --out report.html
    python -m sweeps.report --runs grid.csv --near all --where 'experiment == "llama_3__raw_loss"' --budget 3.8e25
    python -m sweeps.report --decision runs/demo                 the folder that sweeps.decide wrote
    python -m sweeps.report --decision runs/demo --runs-dir /scratch/runs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps.fit import add_run_arguments, fit_experiment, fit_from_arguments, warn_of_mixture
from sweeps.forecast_record import Check, check, log_outcome, markers
from sweeps.outcome import as_forecast, is_late, measured, outcome_section, read_decision
from sweeps.plots import plot_all
from sweeps.report_extras import extras_of
from sweeps.report_page import page

DEFAULT_OUT = Path("report.html")


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
    marks = markers(forecast, metrics["val_loss"])
    figures = plot_all(fit.analysis, folder, marks)
    late = is_late(forecast.forecast_id, decision["experiment"])
    if not late and not (folder / "outcome.json").exists():
        log_outcome(forecast, metrics["val_loss"], run_id, figures=figures)
    judged = {"inside": outcome.inside, "late": late, "relative_error": outcome.relative_error}
    write_text(folder / "outcome.json", json.dumps({**judged, "run_id": run_id, **metrics}, indent=1))
    first = (outcome_section(forecast, outcome, metrics, late),)
    extras = extras_of(decision["experiment"], f"Forecast and outcome: {decision['experiment']}", first, marks)
    write_text(folder / "report.html", page(fit, extras))
    return outcome, metrics


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.report`."""
    p = command_parser("sweeps.report", __doc__)
    add_run_arguments(p, required=False)
    p.add_argument("--budget", type=float, nargs="+", default=[], metavar="FLOPS", help="target budgets to decide for")
    p.add_argument("--title", metavar="TEXT", help="of the page")
    p.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help="page to write")
    p.add_argument("--decision", type=Path, metavar="DIR", help="folder made by sweeps.decide, in place of --runs")
    p.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR", help="folder of all training runs")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a report, also when the forecast missed; 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments))


def _command(arguments: argparse.Namespace) -> None:
    if (arguments.decision is None) == (arguments.runs is None):
        raise ConfigError("give either --runs FILE.csv|mlflow:EXPERIMENT or --decision DIR")
    if arguments.decision is not None:
        outcome, _ = report(arguments.decision, arguments.runs_dir)
        print(outcome.text)
        print(f"report: {arguments.decision / 'report.html'}")
        return
    check_places((arguments.out,))
    fit = fit_from_arguments(arguments, arguments.budget, log=False)
    warn_of_mixture(fit.analysis.table)
    source: str = arguments.runs
    experiment = source.removeprefix("mlflow:") if source.startswith("mlflow:") else None
    title = arguments.title or f"Scaling report: {experiment or Path(source).name}"
    write_text(arguments.out, page(fit, extras_of(experiment, title, tracking_uri=arguments.tracking_uri)))
    print(f"verdict: {fit.analysis.verdict}")
    print(f"report: {arguments.out}")


if __name__ == "__main__":
    sys.exit(main())
