"""Writes down what a planned run should reach, before it runs: size, tokens and loss with a 95% interval.

Examples:
  python -m sweeps.forecast --runs mlflow:scalewright-demo --budget 3.6e12 --json forecast.json
  python -m sweeps.forecast --runs runs.csv --budget 1e21 --shapes shapes.yaml --sequence-length 2048
  python -m sweeps.ledger --experiment scalewright-demo   afterwards: inside or outside, the score of all forecasts
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps.fit import add_run_arguments, fit_from_arguments
from sweeps.forecast_record import Check, check, log_forecast, log_outcome, markers
from sweeps.forecasting import Forecast, make_forecast, nearest_shape, read_shapes

__all__ = [
    "Check", "Forecast", "check", "log_forecast", "log_outcome", "main", "make_forecast", "markers", "nearest_shape",
    "read_shapes",
]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.forecast`."""
    p = command_parser("sweeps.forecast", __doc__)
    add_run_arguments(p)
    p.add_argument("--budget", type=float, required=True, metavar="FLOPS", help="of the planned run")
    p.add_argument("--shapes", type=Path, metavar="FILE.yaml", help="list of shapes to choose from")
    p.add_argument("--sequence-length", type=int, metavar="TOKENS", help="of the planned run; needed with --shapes")
    p.add_argument("--global-batch-tokens", type=int, metavar="TOKENS", help="rounds the plan to whole steps")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the forecast here")
    p.add_argument("--for-run", default="", metavar="RUN_ID", help="MLflow run it is for, created but not begun")
    p.add_argument("--late", action="store_true", help="write it although the run has begun: marked, never scored")
    p.add_argument("--no-mlflow", action="store_true", help="do not write the forecast to MLflow")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a forecast, 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments))


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for options that make no forecast, before anything is fitted or written."""
    to_mlflow = arguments.runs.startswith("mlflow:") and not arguments.no_mlflow
    if (arguments.for_run or arguments.late) and not to_mlflow:
        raise ConfigError("--for-run and --late are of forecasts in MLflow: give --runs mlflow:EXPERIMENT")
    if arguments.bootstrap == 0:
        raise ConfigError("--bootstrap 0 gives no interval, and a forecast is one; give 200 replicates or more")
    if arguments.shapes and arguments.sequence_length is None:
        raise ConfigError("--shapes needs --sequence-length, to count their FLOPs")
    for name, value in (
        ("sequence-length", arguments.sequence_length),
        ("global-batch-tokens", arguments.global_batch_tokens),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; give 1 token or more")
    check_places((arguments.json,))


def _command(arguments: argparse.Namespace) -> None:
    source: str = arguments.runs
    _check(arguments)
    shapes = read_shapes(arguments.shapes) if arguments.shapes else []
    report = fit_from_arguments(arguments, [arguments.budget], log=False)
    forecast = make_forecast(report, arguments.budget, shapes, arguments.sequence_length, arguments.global_batch_tokens)
    if source.startswith("mlflow:") and not arguments.no_mlflow:
        experiment = source.removeprefix("mlflow:")
        forecast = log_forecast(
            forecast, experiment, arguments.sweep, arguments.tracking_uri, arguments.for_run, arguments.late
        )
    print(forecast.text())
    if forecast.mlflow_run_id:
        print(
            f"  MLflow run {forecast.mlflow_run_id}; tag the training run with"
            f" scalewright.forecast_id={forecast.forecast_id}"
        )
    if arguments.json:
        write_text(arguments.json, json.dumps(asdict(forecast), indent=1))


if __name__ == "__main__":
    sys.exit(main())
