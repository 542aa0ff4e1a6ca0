"""Jobs of a sweep under its parent run: Ray, MLflow and signals around them. Shared by the drivers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lm.data.mix import rule_of
from lm.errors import ConfigError
from plugins.loggers.sweep_ledger import CELL, RUNNING, TRUNK, SweepLedger, this_driver
from sweeps.cluster import check_nodes
from sweeps.config import SweepConfig
from sweeps.grid import Corpus
from sweeps.jobs import Job
from sweeps.kind import SweepKind
from sweeps.ray_session import ray_session


def cell_facts(config: SweepConfig, corpus: Corpus) -> dict[str, Any]:
    """Params of every cell that tables of runs have columns for."""
    weights = config.data.weights or corpus.train_tokens
    rule = rule_of(weights, corpus.train_tokens)
    sources = list(weights) if rule is None else rule.sources or list(corpus.train_tokens)
    return {
        "source": "+".join(sorted(sources)),
        "unique_tokens": sum(corpus.train_tokens.get(name, 0) for name in sources),
    }


def run_jobs(
    ledger: SweepLedger,
    config: SweepConfig,
    grid: str,
    jobs: Sequence[Job],
    kind: SweepKind,
    parent: str,
    cores: int,
    done_before: int = 0,
) -> float:
    """Run jobs under a parent run, on this machine or on the cluster of RAY_ADDRESS; print the utilisation.

    Args:
        grid: id of the set of cells, written to the parent.
        kind: what is special about this kind of sweep.
        cores: of a Ray of this machine's own.
        done_before: cells that were done already.

    Returns:
        Compute seconds of the trials over cores (or devices) x wall seconds.

    Raises:
        ConfigError: the cluster cannot run the cells.
        KeyboardInterrupt: stopped; the runs that were cut off are marked.
    """
    from sweeps.tuning import run_trials

    ledger.claim(parent, grid, this_driver())
    running = sum(job.spec["kind"] == CELL for job in jobs)
    started = time.perf_counter()
    try:
        with ray_session(cores, config.resources) as session, _interruptible():
            ledger.claim(parent, grid, this_driver(session.name))
            if "RAY_ADDRESS" in os.environ:
                check_nodes(config, ledger.uri)
            compute_seconds = run_trials(ledger, config, jobs, parent, session.slots, done_before, kind)
            wall_seconds = time.perf_counter() - started
    except KeyboardInterrupt:
        ledger.supersede(ledger.cells(parent))
        for run in ledger.cells(parent, TRUNK):
            if run.status == RUNNING:
                ledger.finish_sweep(run.run_id, "interrupted", {})
        ledger.finish_sweep(parent, "interrupted", {})
        raise
    except ConfigError:
        ledger.finish_sweep(parent, "interrupted", {})
        raise
    utilisation = compute_seconds / (session.units * wall_seconds)
    print(
        f"{running} cells in {wall_seconds:.0f} s on {session.units:g} {session.unit}: {compute_seconds:.0f} compute"
        f" seconds, utilisation {utilisation:.0%}",
        flush=True,
    )
    return utilisation


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a sweep as cleanly as Ctrl-C does. Entered after Ray starts, which sets a handler of its own."""
    previous = signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
