"""Send to MLflow what a run logged while no server took it. A run that goes on sends it by itself.

The address is MLFLOW_TRACKING_URI, or mlflow.db in the working directory, as for training. What was sent already is not
sent again. A run whose process was killed is marked so.

Examples:
    python -m recipes.mlflow_sync runs/demo
    MLFLOW_TRACKING_URI=http://host:5000 python -m recipes.mlflow_sync runs/demo runs/other
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lm.errors import ConfigError
from plugins.loggers.delivery import one_line
from plugins.loggers.history import History
from plugins.loggers.journal import open_journal
from plugins.loggers.sender import Sender
from plugins.loggers.tracking import absolute_uri, check_store, tracking_uri
from recipes.command import command_parser, exit_status


def sync(run_dir: Path) -> str:
    """Send a run's journal; one line about it.

    Raises:
        ConfigError: no run, no server, a server that refuses, or the run is being trained.
    """
    journal = open_journal(run_dir)
    uri = absolute_uri(tracking_uri())
    check_store(uri)
    sender = Sender(run_dir, journal, uri, flush_seconds=10.0)
    try:
        sender.lock()
        history = History(journal)
        if history.status == "RUNNING":  # nobody holds the lock, so nobody trains
            journal.append({"do": "status", "time": history.now_ms(), "status": "KILLED"})
        sender.adopt_or_renew()
        while sender.send_batch():
            pass
    except ConfigError as error:
        raise ConfigError(f"{error}: the run sends them by itself") from None
    except Exception as error:
        raise ConfigError(f"{run_dir}: MLflow at {tracking_uri()} stopped taking points: {one_line(error)}") from None
    finally:
        sender.stop()
    return f"{run_dir}: {sender.sent_points} points sent to MLflow run {sender.delivery.run_id}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 all sent, 2 with one line otherwise."""
    parser = command_parser("recipes.mlflow_sync", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/demo")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: _command(arguments), "stopped; the same command goes on")


def _command(arguments: argparse.Namespace) -> None:
    for run_dir in arguments.runs:
        print(sync(run_dir))


if __name__ == "__main__":
    sys.exit(main())
