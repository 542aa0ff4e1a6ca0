"""Proposes the next cells of a sweep: those that shrink the interval on the decision most for the FLOPs they cost.

Examples:
  python -m sweeps.next --runs mlflow:scalewright-demo --budget 1e13
  python -m sweeps.next --runs mlflow:scalewright-demo --budget 1e13 --config conf/sweep/demo.yaml --out next.yaml
  python -m sweeps.next --runs runs.csv --budget 1e21 --flops 2e20 --cells 6 --decision loss
  python -m sweeps.next --runs runs.csv --budget 1e21 --approach isoflop      whole rows, for approach 2
  python -m sweeps.next --simulate --sweeps 40       does it beat a uniform grid at equal FLOPs?

The decision is the best size N* (or the loss there) at the budget asked for. One cell tests the fitted form beyond the
grid: forecast it before it runs. With --config the cells are real shapes of that sweep, and --out writes a config that
`sweeps.isoflop --resume` takes. How cells are chosen, and what it is worth: docs/forecasts.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps.fit import add_run_arguments, check_options, columns_of, near_of, warn_of_mixture
from sweeps.next_config import Family, extended_config
from sweeps.next_text import proposal_dict, proposal_text, rows_text, simulation_text
from sweeps.records import read_runs
from sweeps.scaling.design import DECISIONS
from sweeps.scaling.next_simulation import simulate
from sweeps.scaling.proposal import base_of, propose
from sweeps.scaling.row_design import propose_rows
from sweeps.scaling.surfaces import SURFACES
from sweeps.scaling.table import RunTable

LARGEST_REACH = 1e6  # of simulated targets


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.next`."""
    p = command_parser("sweeps.next", __doc__)
    add_run_arguments(p)
    p.add_argument("--budget", type=float, required=True, metavar="FLOPS", help="target budget of the decision")
    p.add_argument("--flops", type=float, metavar="FLOPS", help="of all new cells (default: 3 more sizes a budget)")
    p.add_argument("--cells", type=int, metavar="K", help="new cells at most (default: 3 for each budget)")
    p.add_argument("--largest", type=float, metavar="FLOPS", help="new largest budget (default: one step of the grid)")
    p.add_argument("--decision", choices=DECISIONS, default="size", help="what is to be known")
    p.add_argument("--config", type=Path, metavar="FILE", help="the sweep's: cells are its shapes")
    p.add_argument("--out", type=Path, metavar="FILE", help="write the sweep's config with the new cells here")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the proposal here")
    return p


def simulation_parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.next --simulate`."""
    p = command_parser("sweeps.next --simulate", "Extends simulated sweeps by `next` and by uniform grids.")
    p.add_argument("--simulate", action="store_true", required=True, help="simulate sweeps instead of reading runs")
    p.add_argument("--sweeps", type=int, default=40, metavar="K", help="simulated sweeps")
    p.add_argument("--surface", nargs="+", choices=SURFACES, default=list(SURFACES), help="default: all")
    p.add_argument("--reach", type=float, default=100.0, metavar="X", help="target over the largest swept budget")
    p.add_argument("--noise-sd", type=float, default=0.003, metavar="SD", help="of ln loss")
    p.add_argument("--seed", type=int, default=0, help="of the simulated sweeps")
    p.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a proposal, 2 with one line on stderr."""
    words = sys.argv[1:] if argv is None else list(argv)
    if "--simulate" in words:
        simulation = simulation_parser().parse_args(words)
        return exit_status(lambda: _simulate(simulation))
    arguments = parser().parse_args(words)
    return exit_status(lambda: _command(arguments))


def _command(arguments: argparse.Namespace) -> None:
    _check(arguments)
    table = read_runs(arguments.runs, columns_of(arguments), arguments.where, arguments.tracking_uri, arguments.sweep)
    warn_of_mixture(table)
    if arguments.approach == "isoflop":
        found = propose_rows(table, arguments.budget, arguments.flops, near_of(arguments), arguments.seed)
        print(rows_text(found, arguments.budget))
        return
    family = _family(arguments.config, table) if arguments.config else None
    base = base_of(
        table if arguments.max_excess is None else table.near_minimum(arguments.max_excess),
        arguments.bootstrap,
        arguments.seed,
    )
    proposal = propose(
        base, arguments.budget, arguments.flops, arguments.cells, arguments.largest, arguments.decision,
        family.sizes if family else None,
    )  # fmt: skip
    runs = family.cells(proposal.cells) if family else None
    print(proposal_text(base, proposal, runs))
    if arguments.json:
        write_text(arguments.json, json.dumps(proposal_dict(base, proposal, runs), indent=1))
    if arguments.out and family and runs:
        write_text(arguments.out, extended_config(arguments.config, family, runs))
        print(f"config: python -m sweeps.isoflop --config {arguments.out} --resume")


def _check(arguments: argparse.Namespace) -> None:
    if arguments.noise_sd is not None:
        raise ConfigError("--noise-sd is not used here: the noise is what the runs show around their fit; leave it out")
    check_options([arguments.budget], arguments.bootstrap, arguments.seed, arguments.max_excess, None)
    near_of(arguments)
    check_places((arguments.json, arguments.out))
    if arguments.flops is not None and not (math.isfinite(arguments.flops) and arguments.flops > 0):
        raise ConfigError(f"--flops is {arguments.flops:g}; give FLOPs above 0 for all new cells together")
    if arguments.cells is not None and arguments.cells < 1:
        raise ConfigError(f"--cells must be 1 or more, got {arguments.cells}")
    if arguments.out and not arguments.config:
        raise ConfigError("--out writes the sweep's config with the new cells: name it with --config")
    if arguments.approach not in ("parametric", "isoflop", "all"):
        raise ConfigError(f"--approach {arguments.approach} has no design of its own; take parametric or isoflop")
    if arguments.approach == "isoflop" and (
        arguments.config or arguments.decision != "size" or arguments.cells or arguments.json or arguments.largest
    ):
        raise ConfigError(
            "--approach isoflop proposes whole rows for N*: without --config, --cells, --json, --largest and"
            " --decision loss"
        )
    if arguments.bootstrap < 50:
        raise ConfigError(f"--bootstrap {arguments.bootstrap} is too few to know what is uncertain; take 50 or more")


def _family(path: Path, table: RunTable) -> Family:
    from sweeps.config import load_config
    from sweeps.isoflop import read_corpus

    config = load_config(path)
    if not len(table):
        raise ConfigError(f"no usable runs in the table: {table.why_empty()}")
    known = [float(b) for b in table.budgets]
    if not any(math.isclose(c, b, rel_tol=0.01) for c in config.budgets for b in known):
        raise ConfigError(f"none of the runs' budgets is one of {path}: is it this sweep's config?")
    return Family(config, read_corpus(config.data.dir))


def _simulate(arguments: argparse.Namespace) -> None:
    if arguments.sweeps < 2 or arguments.seed < 0:
        raise ConfigError("--sweeps must be 2 or more, --seed 0 or more")
    if not (0 < arguments.noise_sd < 1 and 1 <= arguments.reach <= LARGEST_REACH):
        raise ConfigError(f"--noise-sd must lie between 0 and 1, --reach between 1 and {LARGEST_REACH:g}")
    check_places((arguments.json,))
    numbers = {}
    for name in arguments.surface:
        arms = simulate(name, arguments.sweeps, arguments.reach, arguments.noise_sd, seed=arguments.seed)
        print(simulation_text(name, arms), flush=True)
        numbers[name] = {arm: {key: list(value) for key, value in asdict(a).items()} for arm, a in arms.items()}
    if arguments.json:
        write_text(arguments.json, json.dumps(numbers, indent=1))


if __name__ == "__main__":
    sys.exit(main())
