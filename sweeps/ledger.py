"""Every forecast held against its run: inside or outside, the ones still open, and the score over all of them.

Examples:
  python -m sweeps.ledger --experiment scalewright-demo
  python -m sweeps.ledger --plot forecasts.png --json forecasts.json      all experiments
  python -m sweeps.ledger --give-up 3f2a90c1b7de --reason "diverged twice, stopped"

A forecast is scored by the first run of its own that finished; later repeats do not count, or one could train until
the interval is hit. A run that diverged, or that was given up, is outside: somebody who relied on the forecast got no
model. A forecast made after its run had logged a loss is late and never scored. What is decided is written to the
forecast's MLflow run (loss, error, inside, interval_score); asking again writes nothing twice.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from plugins.loggers.tracking import tracking_uri
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps.ledger_rows import give_up, read_ledger, settle
from sweeps.ledger_score import ledger_dict, ledger_text
from sweeps.mlflow_runs import require_store


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.ledger`."""
    p = command_parser("sweeps.ledger", __doc__)
    p.add_argument("--experiment", metavar="NAME", help="only its forecasts (default: every experiment's)")
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="predicted against measured, with intervals")
    p.add_argument("--json", type=Path, metavar="FILE", help="write rows and scores here")
    p.add_argument("--give-up", metavar="FORECAST_ID", help="its run will never finish: count it as outside")
    p.add_argument("--reason", default="", metavar="TEXT", help="why, with --give-up")
    p.add_argument("--read-only", action="store_true", help="write nothing to MLflow")
    p.add_argument("--tracking-uri", metavar="URI", help="MLflow; else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a ledger, whatever the forecasts were worth; 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments))


def _command(arguments: argparse.Namespace) -> None:
    uri: str = arguments.tracking_uri or tracking_uri()
    require_store(uri)
    check_places((arguments.json, arguments.plot))
    rows = read_ledger(arguments.experiment, uri)
    if arguments.give_up:
        give_up(rows, arguments.give_up, arguments.reason, uri)
        rows = read_ledger(arguments.experiment, uri)
    if not arguments.read_only and settle(rows, uri):
        rows = read_ledger(arguments.experiment, uri)
    print(ledger_text(rows))
    if arguments.json:
        write_text(arguments.json, json.dumps(ledger_dict(rows), indent=1))
        print(f"numbers: {arguments.json}")
    if arguments.plot:
        from sweeps.ledger_plot import plot_ledger

        plot_ledger(rows, arguments.plot)
        print(f"figure: {arguments.plot}")


if __name__ == "__main__":
    sys.exit(main())
