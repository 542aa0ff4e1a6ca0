"""What the commands that run a sweep have in common on their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places
from sweeps.config import SweepConfig


class Sweep(Protocol):
    """Settings of a sweep that is no IsoFLOP grid: `common` are those that every kind has."""

    @property
    def common(self) -> SweepConfig: ...


S = TypeVar("S", bound=Sweep)
STOPPED = "stopped; finished cells are kept, the same command with --resume runs the others"


def sweep_parser(command: str, doc: str | None, example: str) -> argparse.ArgumentParser:
    """A parser with the options of every kind of sweep; `example` is a file for --config."""
    parser = command_parser(command, doc)
    parser.add_argument("--config", required=True, metavar="FILE", help=f"sweep settings, such as {example}")
    parser.add_argument("--resume", action="store_true", help="run only the cells that an earlier sweep still lacks")
    parser.add_argument("--dry-run", action="store_true", help="print the grid and stop")
    add_names(parser)
    parser.add_argument("--cores", type=int, help="CPU cores to use (default: all that this process may use)")
    return parser


def add_names(parser: argparse.ArgumentParser) -> None:
    """--name and --experiment, which win over a config's."""
    parser.add_argument("--name", help="name of the sweep; wins over the file's")
    parser.add_argument("--experiment", help="MLflow experiment; wins over the file's")


def names_of(args: argparse.Namespace) -> dict[str, str]:
    """Those of add_names that were given, as overrides for a config."""
    return {key: value for key in ("name", "experiment") if (value := getattr(args, key))}


def run_command(
    args: argparse.Namespace,
    load: Callable[[str, dict[str, str]], S],
    dry_run: Callable[[S], int],
    run: Callable[[S, Path], bool],
) -> int:
    """What `sweeps.mup_lr` and `sweeps.mix` do with their options; see `exit_status` for what is returned.

    Args:
        load: reads the settings. dry_run: prints the grid.
        run: runs and reports into the folder of figure and JSON; whether every cell has a result.
    """

    def command() -> int:
        sweep = load(args.config, names_of(args))
        check_cores(args.cores, sweep.common)
        if args.dry_run:
            return dry_run(sweep)
        folder = Path(args.out or Path(sweep.common.runs_dir) / sweep.common.name)
        check_places((), (folder,))
        return 0 if run(sweep, folder) else 1

    return exit_status(command, STOPPED)


def check_cores(cores: int | None, config: SweepConfig) -> None:
    """Raises ConfigError where --cores is less than one trial takes."""
    if cores is not None and cores < config.resources.trial_cpus:
        raise ConfigError(f"--cores {cores} is fewer than one trial takes ({config.resources.trial_cpus})")
