"""How good would the forecasts of a finished sweep have been? Its larger budgets are forecast from its smaller ones.

The runs up to each budget from the fourth on are fitted as sweeps.fit does; the preferred approach forecasts the best
run of each larger budget, up to 30 times beyond, and the 95% intervals are held against what was measured.

Examples:
  python -m sweeps.backtest --runs mlflow:scalewright-scaling
  python -m sweeps.backtest --runs published.csv --by experiment --columns.budget C_budget --plot backtest.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lm.columns import aligned
from lm.data.files import plain
from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps.backtest_plot import plot_backtest
from sweeps.fit import check_options, columns_of, near_of, run_columns
from sweeps.fit_report import quantity
from sweeps.records import read_runs
from sweeps.scaling.backtest import Trial, backtest
from sweeps.scaling.table import FitError, RunTable


@dataclass(frozen=True)
class Share:
    """How many forecasts have an interval and are inside; the same for N*; median |ln error| and half-width of ln loss.

    The forecasts of one sweep share runs: they are not independent, so a share has no interval of its own.
    """

    forecasts: int
    inside: int
    sizes: int
    sizes_inside: int
    error: float
    half_width: float


def share_of(trials: Sequence[Trial]) -> Share:
    """Counts and medians of some trials."""
    judged = [t for t in trials if t.inside is not None]
    sized = [t for t in trials if t.n_inside is not None]
    errors = [abs(np.log(t.measured / t.loss)) for t in trials]
    halves = [0.5 * np.log(t.interval.high / t.interval.low) for t in judged if t.interval.low > 0]
    return Share(
        len(judged), sum(bool(t.inside) for t in judged), len(sized), sum(bool(t.n_inside) for t in sized),
        float(np.median(errors)) if errors else float("nan"), float(np.median(halves)) if halves else float("nan"),
    )  # fmt: skip


def groups(table: RunTable, by: Sequence[str]) -> Iterator[tuple[str, RunTable]]:
    """The table's runs by the values of some columns; one group without columns.

    Raises:
        ConfigError: a column that no run has.
    """
    for name in by:
        if not any(name in run.extra for run in table.runs):
            known = sorted({key for run in table.runs for key in run.extra})
            raise ConfigError(f"--by {name}: no such column; there are {', '.join(known)}")
    values = [" ".join(str(run.extra.get(name, "")) for name in by) or "all runs" for run in table.runs]
    for value in dict.fromkeys(values):
        yield value, table.where([other == value for other in values])


def trials_text(trials: Sequence[Trial]) -> str:
    """A line a trial."""
    rows: list[tuple[str, ...]] = [
        ("fitted to", "forecast", "beyond", "approach", "loss, 95%", "measured", "", "N*, 95%", "vertex", "")
    ]
    for t in trials:
        loss = f"{t.loss:.3f} [{t.interval.low:.3f}, {t.interval.high:.3f}]"
        size = f"{quantity(t.n_interval.low)} to {quantity(t.n_interval.high)}"
        budgets = f"{t.from_budget:.3g}", f"{t.budget:.3g}", f"{t.budget / t.from_budget:.3g}x"
        held = loss, f"{t.measured:.3f}", _word(t.inside), size, quantity(t.n_measured), _word(t.n_inside)
        rows.append((*budgets, t.approach, *held))
    return aligned(rows, text_columns=None)


def _word(inside: bool | None) -> str:
    return "-" if inside is None else "inside" if inside else "OUTSIDE"


def shares_text(shares: dict[str, Share]) -> str:
    """A line a sweep, and one over all, as Markdown."""
    lines = ["| sweep | runs inside | N* inside | median error | median half-width |", "|---|---|---|---|---|"]
    for name, s in shares.items():
        lines.append(
            f"| {name} | {s.inside} of {s.forecasts} | {s.sizes_inside} of {s.sizes} | {s.error:.1%} "
            f"| {s.half_width:.1%} |"
        )
    whole = [s for s in shares.values() if s.forecasts and s.sizes]
    if len(whole) > 1:
        mean = [np.mean([s.inside / s.forecasts for s in whole]), np.mean([s.sizes_inside / s.sizes for s in whole])]
        lines.append(f"mean of the sweeps' shares: {mean[0]:.1%} of runs, {mean[1]:.1%} of N*")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.backtest`."""
    p = command_parser("sweeps.backtest", __doc__)
    p.add_argument("--runs", required=True, metavar="FILE.csv|mlflow:EXPERIMENT", help="where the runs are")
    run_columns(p)
    p.add_argument("--by", nargs="+", default=[], metavar="COLUMN", help="each value of these columns is one sweep")
    p.add_argument("--bootstrap", type=int, default=400, metavar="K", help="replicates")
    p.add_argument("--json", type=Path, metavar="FILE", help="write every forecast here")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw forecasts and what was measured, a panel a sweep")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a table, 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments))


def _command(arguments: argparse.Namespace) -> None:
    check_options((), arguments.bootstrap, arguments.seed, None, None)
    if arguments.bootstrap == 0:
        raise ConfigError("--bootstrap is 0; give 2 replicates or more: without intervals there is nothing to test")
    check_places((arguments.json, arguments.plot))
    table = read_runs(arguments.runs, columns_of(arguments), arguments.where, arguments.tracking_uri, arguments.sweep)
    found: dict[str, list[Trial]] = {}
    for name, part in groups(table, arguments.by):
        try:
            found[name] = _show(name, part, arguments)
        except FitError as error:
            print(f"{name}: {error}")
    if not any(found.values()):
        raise FitError("nothing could be forecast; see the lines above")
    shares = {name: share_of(trials) for name, trials in found.items()}
    print(shares_text(shares))
    if arguments.plot:
        plot_backtest(found, arguments.plot)
    if arguments.json:
        content = {name: [asdict(t) | {"inside": t.inside} for t in trials] for name, trials in found.items()}
        write_text(arguments.json, json.dumps(plain(content), indent=1))


def _show(name: str, table: RunTable, arguments: argparse.Namespace) -> list[Trial]:
    trials = []
    with np.errstate(all="ignore"):
        for trial in backtest(table, arguments.bootstrap, arguments.seed, near_of(arguments)):
            trials.append(trial)
            print(f"\r{name}: {len(trials)} forecasts", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{name}\n{trials_text(trials)}\n", flush=True)
    return trials


if __name__ == "__main__":
    sys.exit(main())
