"""Measures how often nominal 95% intervals hold the truth, on simulated sweeps whose truth is known.

Each sweep draws a design (budgets x sizes, centred off the optimum by a random factor) and noise of ln loss, is fitted
as `sweeps.fit` fits it, and its intervals of a, N*, D* and of the loss that a run at the optimum measures, at a target
budget, are held against the surface's own values. `preferred` is what a user acts on: all approaches are fitted, the
preferred one decides, and the loss is that of a run at its N* and D*, in the interval `sweeps.forecast` would give it.

Examples:
  python -m sweeps.scaling.coverage --sweeps 100
  python -m sweeps.scaling.coverage --surface ratio3 --approach isoflop --design small --json coverage.json
  python -m sweeps.scaling.coverage --sweeps 500 --jobs 2 --json coverage.json       (again: goes on where it stopped)
  python -m sweeps.scaling.coverage --surface bent --approach preferred parametric
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps.scaling.analysis import Decision, Result, analyse
from sweeps.scaling.approaches import APPROACHES
from sweeps.scaling.decided import decided
from sweeps.scaling.simulated import DESIGNS, Design, simulate
from sweeps.scaling.surfaces import WORLDS, KnownSurface

QUANTITIES = ("a", "n_opt", "d_opt", "loss")
COLUMNS = (*QUANTITIES, "n_half", "loss_half", "a_error", "n_error")
PREFERRED = "preferred"
CHUNK = 10
NOMINAL = (0.92, 0.98)


def one_sweep(
    surface: KnownSurface, design: Design, approaches: Sequence[str], bootstrap: int, seed: int
) -> dict[str, list[float | None]]:
    """Whether each interval of one sweep holds the truth.

    Returns:
        by approach, in the order of COLUMNS: 1 inside, 0 outside, None refused; then the half-widths of ln N* and ln
        loss, and the errors of a and of ln N*.
    """
    table, target, noise = simulate(surface, design, seed)
    analysis = analyse(table, None if PREFERRED in approaches else approaches, [target], bootstrap, seed)
    out: dict[str, list[float | None]] = {}
    for name in approaches:
        result = analysis.results.get(name)
        if name == PREFERRED and analysis.results:
            result = analysis.best
        if result is None:
            out[name] = [None] * len(COLUMNS)
            continue
        acted = decided(analysis)[0] if name == PREFERRED else None
        out[name] = _held(surface, target, noise, result, acted, seed)
    return out


def _held(
    surface: KnownSurface, target: float, noise: float, result: Result, acted: Decision | None, seed: int
) -> list[float | None]:
    """One row of `one_sweep`. Where it is acted on, the run is at the fit's own N* and D*, else at the true ones."""
    true_n, true_d = float(surface.n_opt(target)), float(surface.d_opt(target))
    decision = acted or result.decisions[0]
    n, d = (decision.n_opt, decision.d_opt) if acted else (true_n, true_d)
    of_run = acted.loss_interval if acted else result.forecast_interval(n, d, target, seed)
    measured = float(surface.loss(n, d)) * noise
    pairs = [
        (surface.a, result.a_interval), (true_n, decision.n_interval), (true_d, decision.d_interval),
        (measured, of_run),
    ]  # fmt: skip
    held = [None if math.isnan(i.low) or math.isnan(x) else float(x in i) for x, i in pairs]
    widths = [0.5 * math.log(i.high / i.low) if i.low > 0 else None for i in (decision.n_interval, of_run)]
    a_error = None if math.isnan(surface.a) else result.a - surface.a
    return [*held, *widths, a_error, math.log(decision.n_opt / true_n)]


def _cell(task: tuple[str, str, tuple[str, ...], int, int]) -> dict[str, list[float | None]]:
    surface, design, approaches, bootstrap, seed = task
    with np.errstate(all="ignore"):
        return one_sweep(WORLDS[surface], DESIGNS[design], approaches, bootstrap, seed)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        sweeps: intervals counted. refused: sweeps without an answer or an interval.
        held: share of intervals of a, N*, D* and the run's loss that hold the truth.
        n_half, loss_half: median half-widths of ln N* and ln loss. n_bias: mean error of ln N*.
    """

    surface: str
    design: str
    approach: str
    sweeps: int
    refused: int
    held: dict[str, float]
    n_half: float
    loss_half: float
    n_bias: float


def summarise(surface: str, design: str, approach: str, rows: Sequence[Sequence[float | None]]) -> Row:
    """Shares and medians of many sweeps' rows [sweeps, COLUMNS]."""
    values = np.array(rows, dtype=np.float64)
    good = values[np.isfinite(values[:, 1])]
    known = [(name, good[:, i]) for i, name in enumerate(QUANTITIES) if np.isfinite(good[:, i]).any()]
    held = {name: float(np.nanmean(column)) for name, column in known}
    middle = np.nanmedian(good[:, 4:6], axis=0) if len(good) else np.full(2, np.nan)
    bias = float(good[:, 7].mean()) if len(good) else math.nan
    refused = len(values) - len(good)
    return Row(surface, design, approach, len(good), refused, held, float(middle[0]), float(middle[1]), bias)


def table_text(rows: Sequence[Row]) -> str:
    """The table as Markdown, shares outside .92 to .98 marked with *."""
    lines = [
        "| surface | design | approach | sweeps | a | N* | D* | loss of a run | +-N* | +-loss | bias N* |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        shares = " | ".join(_share(r.held.get(name, math.nan)) for name in QUANTITIES)
        refused = f" ({r.refused} refused)" if r.refused else ""
        lines.append(
            f"| {r.surface} | {r.design} | {r.approach} | {r.sweeps}{refused} | {shares} | {r.n_half:.0%} | "
            f"{r.loss_half:.1%} | {r.n_bias:+.1%} |"
        )
    return "\n".join(lines)


def _share(value: float) -> str:
    if math.isnan(value):
        return "-"
    mark = "" if NOMINAL[0] <= round(value, 3) <= NOMINAL[1] else "*"
    return f"{value:.3f}{mark}"


class Store:
    """Finished sweeps by cell and seed, in a JSON file where one was asked for."""

    def __init__(self, path: Path | None, bootstrap: int) -> None:
        self.path, self.bootstrap = path, bootstrap
        self.sweeps: dict[str, dict[str, list[float | None]]] = {}
        if path is not None and path.is_file():
            try:
                saved = json.loads(path.read_text())
                self.sweeps, kept = saved["sweeps"], saved["bootstrap"]
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path} is not what this command writes; name another --json") from None
            if kept != bootstrap:
                raise ConfigError(f"{path} holds sweeps of --bootstrap {kept}; use that, or another --json")

    def get(self, cell: str, seed: int) -> list[float | None] | None:
        """One sweep's row of `surface/design/approach`, or None."""
        return self.sweeps.get(cell, {}).get(str(seed))

    def put(self, cell: str, seed: int, row: list[float | None]) -> None:
        """Keeps a row; `save` writes it."""
        self.sweeps.setdefault(cell, {})[str(seed)] = row

    def save(self, rows: Sequence[Row] = ()) -> None:
        """Writes the file, at once or not at all."""
        if self.path is not None:
            text = json.dumps({"bootstrap": self.bootstrap, "rows": [vars(r) for r in rows], "sweeps": self.sweeps})
            write_text(self.path, text)


def measure(
    surfaces: Sequence[str],
    designs: Sequence[str],
    approaches: Sequence[str],
    sweeps: int,
    bootstrap: int,
    seed: int,
    jobs: int,
    store: Store,
) -> list[Row]:
    """Runs what the store lacks, saving every few sweeps, and summarises."""
    seeds = range(seed, seed + sweeps)
    cells = [(s, d) for d in designs for s in surfaces]
    tasks = [
        (s, d, missing, bootstrap, i)
        for i in seeds
        for s, d in cells
        if (missing := tuple(a for a in approaches if store.get(f"{s}/{d}/{a}", i) is None))
    ]
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        for first in range(0, len(tasks), CHUNK * jobs):
            part = tasks[first : first + CHUNK * jobs]
            for task, found in zip(part, pool.map(_cell, part) if pool else map(_cell, part), strict=True):
                for approach, held in found.items():
                    store.put(f"{task[0]}/{task[1]}/{approach}", task[4], held)
            store.save()
            print(f"\r{first + len(part)} of {len(tasks)} sweeps", end="", file=sys.stderr, flush=True)
    if tasks:
        print(file=sys.stderr)
    rows = [
        summarise(s, d, a, [row for i in seeds if (row := store.get(f"{s}/{d}/{a}", i)) is not None])
        for s, d in cells
        for a in approaches
    ]
    store.save(rows)
    return rows


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.scaling.coverage`."""
    p = command_parser("sweeps.scaling.coverage", __doc__)
    p.add_argument("--sweeps", type=int, default=500, metavar="S", help="per surface and design")
    p.add_argument("--surface", default="all", choices=[*WORLDS, "all"])
    p.add_argument("--design", default="medium", choices=[*DESIGNS, "all"], help="budgets and sizes")
    named = [*APPROACHES, PREFERRED]
    p.add_argument("--approach", nargs="+", default=["isoflop", "parametric"], choices=named, metavar="NAME",
                   help=f"of {', '.join(named)} (default isoflop parametric)")  # fmt: skip
    p.add_argument("--bootstrap", type=int, default=400, metavar="K", help="replicates a sweep")
    p.add_argument("--seed", type=int, default=0, help="of the first sweep")
    p.add_argument("--jobs", type=int, default=1, help="processes")
    p.add_argument("--json", type=Path, metavar="FILE", help="keep sweeps here; a second call goes on where it stopped")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a table, 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments), "stopped; with --json the same command goes on")


def _command(arguments: argparse.Namespace) -> None:
    for name, least in (("sweeps", 1), ("bootstrap", 2), ("jobs", 1), ("seed", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name} is {getattr(arguments, name)}; give {least} or more")
    check_places((arguments.json,))
    rows = measure(
        list(WORLDS) if arguments.surface == "all" else [arguments.surface],
        list(DESIGNS) if arguments.design == "all" else [arguments.design],
        list(dict.fromkeys(arguments.approach)), arguments.sweeps, arguments.bootstrap, arguments.seed, arguments.jobs,
        Store(arguments.json, arguments.bootstrap),
    )  # fmt: skip
    print(table_text(rows))
    print("share of 95% intervals that hold the truth; * outside .92 to .98; half-widths are medians, bias a mean")


if __name__ == "__main__":
    sys.exit(main())
