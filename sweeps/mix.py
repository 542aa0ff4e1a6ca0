"""Compare candidate mixes: a small model for each at the same tokens, ranked by bits per byte of every source.

Examples:
    python -m sweeps.mix --config conf/sweep/mix.yaml --dry-run     shows the candidates, runs nothing
    python -m sweeps.mix --config conf/sweep/mix.yaml
    python -m sweeps.mix --config conf/sweep/mix.yaml --resume      goes on after Ctrl-C or a kill, with more mixes
    python -m sweeps.mix --config conf/sweep/mix_anneal.yaml        a decay for each candidate, from one stable phase
    RAY_ADDRESS=auto python -m sweeps.mix --config conf/sweep/mix.yaml      on a Ray cluster

Runs and ranking are in MLflow (MLFLOW_TRACKING_URI, or mlflow.db here); figure and JSON are in runs_dir/NAME/.
A finished sweep of the same name and candidates is reused: the command ranks it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plugins.loggers.sweep_ledger import CELL, COMPLETE
from sweeps.grid import Corpus
from sweeps.isoflop import SweepResult, read_corpus, run_grid
from sweeps.kind import SweepKind
from sweeps.mix_grid import Candidate, MixSweep, build_mix_grid, load_mix_sweep, mix_table
from sweeps.mix_rank import MixRun, Ranking, rank
from sweeps.options import run_command, sweep_parser


def run_mix_sweep(sweep: MixSweep, resume: bool = False, cores: int | None = None) -> SweepResult:
    """Run what is missing of a sweep and read all of it back from MLflow.

    Returns:
        As sweeps.isoflop.run_sweep; rows also have mix.

    Raises:
        ConfigError: bad candidates or corpus, or an unfinished sweep of that name without `resume`.
        KeyboardInterrupt: stopped; everything finished is kept.
    """
    corpus = read_corpus(sweep.common.data.dir)
    candidates = build_mix_grid(sweep, corpus)
    for line in mix_table(candidates, corpus, sweep.common.max_epochs)[1]:
        print(f"warning: {line}", file=sys.stderr)
    config = dataclasses.replace(sweep.common, max_epochs=math.inf)  # warned of above, by candidate
    cells = [candidate.cell for candidate in candidates]
    result = run_grid(config, corpus, cells, sweep_kind(sweep, candidates, corpus), resume, cores)
    names = {candidate.cell.cell_id: candidate.mix for candidate in candidates}
    return dataclasses.replace(result, rows=[{**row, "mix": names[row["cell_id"]]} for row in result.rows])


def sweep_kind(sweep: MixSweep, candidates: Sequence[Candidate], corpus: Corpus) -> SweepKind:
    """What the trial machinery must know of a mix sweep."""
    by_id = {candidate.cell.cell_id: candidate for candidate in candidates}
    text = mix_table(candidates, corpus, sweep.common.max_epochs)[0]

    def extend(key: str, spec: dict[str, Any]) -> None:
        if spec["kind"] == CELL:
            with_mix(spec, by_id[key], sweep.anneal)

    return SweepKind(
        title="Mix sweep",
        table=lambda cells: text,
        parent_params={"mixes": " ".join(sweep.mixes), "config": json.dumps(asdict(sweep), sort_keys=True)},
        extend=extend,
    )


def with_mix(spec: dict[str, Any], candidate: Candidate, anneal: bool) -> None:
    """Make a cell's trial spec that of its candidate: mix, name, params."""
    recipe = spec["recipe"]
    if anneal:
        recipe["trainer"]["callbacks"].append(
            {"class_path": "plugins.callbacks.wsd_anneal.WSDAnneal", "init_args": {"weights": candidate.given}}
        )
    else:
        recipe["data"]["weights"] = candidate.given
    spec["label"] = candidate.label
    recipe["trainer"]["logger"]["init_args"]["run_name"] = candidate.label
    spec["params"] |= {"mix": candidate.mix, "mix_weights": json.dumps(candidate.weights)}


def mix_runs(rows: Sequence[Mapping[str, Any]]) -> tuple[list[MixRun], list[str]]:
    """(finished runs of run_mix_sweep's rows, a line for each of the others)."""
    runs, left = [], []
    for row in rows:
        bpb = {name.removeprefix("bpb/"): value for name, value in row.items() if name.startswith("bpb/")}
        if row["status"] == COMPLETE and bpb and all(value is not None for value in bpb.values()):
            runs.append(MixRun(row["mix"], row["seed"], bpb))
        else:
            left.append(f"{row['mix']}-s{row['seed']}: {row['status']} {row['error'].strip()[-200:]}".strip())
    return runs, left


def _parser() -> argparse.ArgumentParser:
    parser = sweep_parser("sweeps.mix", __doc__, "conf/sweep/mix.yaml")
    parser.add_argument("--out", metavar="DIR", help="folder of figure and JSON (default: runs_dir/NAME)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 complete, 1 some runs failed, 2 bad input, 130 interrupted."""
    args = _parser().parse_args(argv)

    def run(sweep: MixSweep, folder: Path) -> bool:
        result = run_mix_sweep(sweep, args.resume, args.cores)
        report(sweep, result, folder)
        return result.complete

    return run_command(args, load_mix_sweep, _dry_run, run)


def report(sweep: MixSweep, result: SweepResult, folder: Path) -> Ranking:
    """Rank what a sweep has, print it, and bring it to `folder` and to MLflow.

    Raises:
        ConfigError: no run has finished.
    """
    from sweeps.mix_report import log_ranking, ranking_text, write_files

    runs, left = mix_runs(result.rows)
    ranking = rank(runs, list(sweep.mixes), _sources(sweep, runs), sweep.score)
    print(ranking_text(ranking))
    for line in left:
        print(f"not used: {line}")
    files = write_files(ranking, runs, folder)
    log_ranking(ranking, runs, sweep, result)
    print(f"wrote {' and '.join(str(file) for file in files)}")
    print(f"MLflow experiment {result.experiment}, parent run {result.parent_run_id}")
    return ranking


def _sources(sweep: MixSweep, runs: Sequence[MixRun]) -> list[str]:
    """Sources that every run was validated on, in the order of the data folder."""
    return [name for name in read_corpus(sweep.common.data.dir).train_tokens if all(name in run.bpb for run in runs)]


def _dry_run(sweep: MixSweep) -> int:
    corpus = read_corpus(sweep.common.data.dir)
    candidates = build_mix_grid(sweep, corpus)
    text, warnings = mix_table(candidates, corpus, sweep.common.max_epochs)
    print(text)
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr)
    flops = sum(candidate.cell.flops for candidate in candidates)
    print(f"{len(candidates)} runs, {flops:.3g} FLOPs as whole runs; nothing was run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
