"""Run an IsoFLOP sweep: budgets x sizes as Ray Tune trials, each a child run of one MLflow parent run.

Examples:
    python -m sweeps.isoflop --config conf/sweep/demo.yaml --dry-run     shows the grid, runs nothing
    python -m sweeps.isoflop --config conf/sweep/demo.yaml
    python -m sweeps.isoflop --config conf/sweep/demo.yaml --resume      goes on after Ctrl-C, a kill or a crash
    RAY_ADDRESS=auto python -m sweeps.isoflop --config conf/sweep/isoflop.yaml

Results are in MLflow (MLFLOW_TRACKING_URI, or mlflow.db here); fit them with python -m sweeps.fit.
A finished sweep of the same name and grid is reused, not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm.data.files import exclusive
from lm.errors import ConfigError
from recipes.command import exit_status
from recipes.files import check_places, write_text
from sweeps.config import SweepConfig, load_config
from sweeps.corpus_store import local_corpus
from sweeps.grid import Cell, Corpus, build_grid, grid_id, plan_grid
from sweeps.grid_text import epoch_warnings, grid_table
from sweeps.job_list import jobs_of
from sweeps.kind import SweepKind
from sweeps.leftovers import remove_leftovers
from sweeps.options import STOPPED, check_cores, names_of, sweep_parser
from sweeps.trunks import savings, trunks_of


@dataclass(frozen=True)
class SweepResult:
    """What a sweep came to.

    Attributes:
        experiment: MLflow experiment.
        parent_run_id: MLflow run that the cells are children of.
        rows: one a cell of the grid, ascending by budget, width and seed; see sweeps.resume.result_rows.
        complete: every cell has a result (complete or diverged).
        utilisation: compute seconds of the trials run now over cores x wall seconds; None when none ran.
    """

    experiment: str
    parent_run_id: str
    rows: list[dict[str, Any]]
    complete: bool
    utilisation: float | None = None


def read_corpus(folder: str) -> Corpus:
    """Vocabulary, tokens and fingerprint of a prepared data folder, or of one in a bucket.

    Raises:
        ConfigError: it is not one.
    """
    from lm.data.shards import load_manifest

    try:
        manifest = load_manifest(local_corpus(folder))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Corpus(manifest.vocab_size, manifest.tokens("train"), manifest.fingerprint())


def run_sweep(config: SweepConfig, resume: bool = False, cores: int | None = None) -> SweepResult:
    """Run what is missing of a sweep and read all of it back from MLflow.

    Args:
        resume: go on with an unfinished sweep of the same name.
        cores: of a Ray of this machine's own; None takes all that the process may use.

    Raises:
        ConfigError: bad grid or corpus, or an unfinished sweep of that name without `resume`.
        KeyboardInterrupt: stopped; everything finished is kept.
    """
    corpus = read_corpus(config.data.dir)
    budgets = " ".join(f"{budget:g}" for budget in sorted(config.budgets))
    kind = SweepKind(parent_params={"budgets": budgets, "config": json.dumps(asdict(config), sort_keys=True)})
    return run_grid(config, corpus, build_grid(config, corpus), kind, resume, cores)


def run_grid(
    config: SweepConfig,
    corpus: Corpus,
    cells: list[Cell],
    kind: SweepKind,
    resume: bool = False,
    cores: int | None = None,
) -> SweepResult:
    """Run what is missing of these cells, as run_sweep does for those of an IsoFLOP grid."""
    from plugins.loggers.tracking import absolute_uri, check_store, tracking_uri

    for line in epoch_warnings(cells, config, corpus):
        print(f"warning: {line}", file=sys.stderr)
    uri = absolute_uri(tracking_uri())
    check_store(uri)
    with exclusive(_lock_file(uri, config), f"another command runs sweep {config.name}: wait for it, or stop it first"):
        return _run_missing(config, corpus, cells, kind, uri, resume, cores)


def _lock_file(uri: str, config: SweepConfig) -> Path:
    """Of this machine: two drivers of one sweep would each take the other's cells for left-overs."""
    key = hashlib.sha256(f"{uri} {config.experiment} {config.name}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"scalewright-sweep-{os.getuid()}-{key}.lock"


def _run_missing(
    config: SweepConfig,
    corpus: Corpus,
    cells: list[Cell],
    kind: SweepKind,
    uri: str,
    resume: bool,
    cores: int | None,
) -> SweepResult:
    from plugins.loggers.sweep_ledger import DONE, FAILED, SweepLedger
    from sweeps.driver import cell_facts, run_jobs
    from sweeps.resume import choose_parent, result_rows, start_over_dead_driver
    from sweeps.settings import settings_of

    remove_leftovers()
    ledger = SweepLedger(uri, config.experiment)  # also makes database and experiment before any trial writes
    settings = settings_of(config, corpus)
    choice = choose_parent(ledger, config, cells, resume, settings)
    print(choice.message, flush=True)
    utilisation = None
    trunks = trunks_of(cells, config, corpus)
    if choice.missing:
        _check_room(config, cores or _cores())
        parent = choice.run_id or _new_parent(ledger, config, cells, kind)
        ledger.describe(parent, settings)
        start_over_dead_driver(ledger, choice)
        jobs = jobs_of(choice.missing, trunks, config, uri, parent, cell_facts(config, corpus))
        for job in jobs if kind.extend else ():
            kind.extend(job.key, job.spec)  # type: ignore[misc]
        done = len(cells) - len(choice.missing)
        utilisation = run_jobs(ledger, config, grid_id(cells), jobs, kind, parent, cores or _cores(), done)
    else:
        parent = choice.run_id or ""
    if trunks:
        print(savings(trunks), flush=True)
    rows = result_rows(ledger, parent, cells)
    complete = all(row["status"] in DONE for row in rows)
    if choice.missing:
        totals = {"cells": float(len(rows)), "cells_done": float(sum(row["status"] in DONE for row in rows))}
        ledger.finish_sweep(parent, "complete" if complete else FAILED, totals)
    return SweepResult(config.experiment, parent, rows, complete, utilisation)


def _check_room(config: SweepConfig, cores: int) -> None:
    """Ray would wait for ever for cores that are not there."""
    if "RAY_ADDRESS" not in os.environ and cores < config.resources.trial_cpus:
        raise ConfigError(
            f"one trial takes {config.resources.trial_cpus} cores (resources: processes x cpus), there are {cores};"
            " ask for fewer, or set RAY_ADDRESS to a cluster"
        )


def _cores() -> int:
    from sweeps.ray_session import usable_cores

    return usable_cores()


def _new_parent(ledger: Any, config: SweepConfig, cells: Sequence[Cell], kind: SweepKind) -> str:
    from recipes.version import git_commit

    params = {
        "sweep": config.name,
        "cells": len(cells),
        "git_commit": git_commit(),
        **kind.parent_params,
    }
    note = f"{kind.title} `{config.name}`: {len(cells)} cells.\n\n```\n{kind.table(cells)}\n```"
    return str(ledger.create_sweep(config.name, grid_id(cells), params, note))


def _parser() -> argparse.ArgumentParser:
    parser = sweep_parser("sweeps.isoflop", __doc__, "conf/sweep/demo.yaml")
    parser.add_argument("--json", metavar="FILE", help="also write parent run id and rows to FILE")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 complete, 1 some cells failed, 2 bad input, 130 interrupted."""
    args = _parser().parse_args(argv)
    return exit_status(lambda: _command(args), STOPPED)


def _command(args: argparse.Namespace) -> int:
    config = load_config(args.config, names_of(args))
    check_cores(args.cores, config)
    if args.dry_run:
        return _dry_run(config)
    check_places((Path(args.json) if args.json else None,))
    result = run_sweep(config, resume=args.resume, cores=args.cores)
    if args.json:
        write_text(Path(args.json), json.dumps(asdict(result), indent=1) + "\n")
    _print_rows(result)
    return 0 if result.complete else 1


def _dry_run(config: SweepConfig) -> int:
    corpus = read_corpus(config.data.dir)
    cells, refused = plan_grid(config, corpus)
    print(grid_table(cells, refused))
    for line in epoch_warnings(cells, config, corpus):
        print(f"warning: {line}", file=sys.stderr)
    print(f"{len(cells)} cells, {sum(cell.flops for cell in cells):.3g} FLOPs, grid {grid_id(cells)}; nothing was run")
    if trunks := trunks_of(cells, config, corpus):
        print(savings(trunks))
    for reason in refused.values():
        print(f"error: {reason}", file=sys.stderr)
    return 2 if refused else 0


def _print_rows(result: SweepResult) -> None:
    print(f"{'budget':>9}{'d_model':>9}{'N':>10}{'tokens':>12}{'val_loss':>10}  status")
    for row in result.rows:
        loss = f"{row['val_loss']:.4f}" if row["val_loss"] is not None else "-"
        print(
            f"{row['budget_flops']:>9.3g}{row['d_model']:>9}{row['n_params']:>10,}{row['d_tokens']:>12,}{loss:>10}"
            f"  {row['status']}"
        )
    for status, note in (("diverged", "no points of their curves"), ("failed", "--resume tries them again")):
        _print_lost([row for row in result.rows if row["status"] == status], status, note)
    print(f"MLflow experiment {result.experiment}, parent run {result.parent_run_id}")


def _print_lost(rows: Sequence[dict[str, Any]], status: str, note: str) -> None:
    """Cells without a loss that counts, each with its reason."""
    if rows:
        print(f"{len(rows)} cells {status} ({note}):")
    for row in rows:
        reason = (
            row["error"].strip().splitlines()[-1] if row["error"].strip() else "its loss is above ln V or not finite"
        )
        print(
            f"  {row['budget_flops']:.3g}-d{row['d_model']}-s{row['seed']}  run {row['run_id']}, {row['tries']} tries:"
            f" {reason[:300]}"
        )


if __name__ == "__main__":
    sys.exit(main())
