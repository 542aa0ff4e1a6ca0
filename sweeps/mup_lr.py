"""Run a learning-rate sweep over widths: does the best rate move, under muP and under the standard parametrisation?

Examples:
    python -m sweeps.mup_lr --config conf/sweep/mup_lr.yaml --dry-run     shows the grid, runs nothing
    python -m sweeps.mup_lr --config conf/sweep/mup_lr.yaml
    python -m sweeps.mup_lr --config conf/sweep/mup_lr.yaml --resume      goes on after Ctrl-C, a kill or a crash
    RAY_ADDRESS=auto python -m sweeps.mup_lr --config conf/sweep/mup_lr.yaml

Cells and the fit are in MLflow (MLFLOW_TRACKING_URI, or mlflow.db here); figure and JSON are in runs_dir/NAME/.
A finished sweep of the same name and grid is reused: the command fits it again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sweeps.isoflop import SweepResult, read_corpus, run_grid
from sweeps.kind import SweepKind
from sweeps.lr_grid import STANDARD, LrCell, LrSweep, build_lr_grid, load_lr_sweep, lr_grid_table, shared_width
from sweeps.options import run_command, sweep_parser
from sweeps.scaling.lr_optimum import NEAREST
from sweeps.scaling.lr_transfer import LrAnalysis, analyse_lr


def run_lr_sweep(sweep: LrSweep, resume: bool = False, cores: int | None = None) -> SweepResult:
    """Run what is missing of a sweep and read all of it back from MLflow.

    Returns:
        As sweeps.isoflop.run_sweep; rows also have param and are ascending by param, width, batch, rate and seed.

    Raises:
        ConfigError: bad grid or corpus, or an unfinished sweep of that name without `resume`.
        KeyboardInterrupt: stopped; everything finished is kept.
    """
    corpus = read_corpus(sweep.common.data.dir)
    cells = build_lr_grid(sweep, corpus)
    result = run_grid(sweep.common, corpus, list(cells), sweep_kind(sweep, cells), resume, cores)
    return dataclasses.replace(result, rows=lr_rows(result.rows, cells, sweep))


def lr_rows(rows: Sequence[Mapping[str, Any]], cells: Sequence[LrCell], sweep: LrSweep) -> list[dict[str, Any]]:
    """Rows of sweeps.resume.result_rows with their param, ascending by param, width, batch, rate and seed.

    Runs of the width that both parametrisations share are there twice, once under each.
    """
    param = {cell.cell_id: cell.param for cell in cells}
    order = ("param", "d_model", "global_batch_tokens", "lr", "seed")
    named = [{**row, "param": param[row["cell_id"]]} for row in rows]
    named += [{**row, "param": STANDARD} for row in named if row["d_model"] == shared_width(sweep)]
    return sorted(named, key=lambda row: tuple(row[name] for name in order))


def sweep_kind(sweep: LrSweep, cells: Sequence[LrCell]) -> SweepKind:
    """What the trial machinery must know of a learning-rate sweep."""
    return SweepKind(
        title="Learning-rate sweep",
        table=lr_grid_table,
        parent_params={
            "widths": " ".join(map(str, sweep.widths)),
            "lrs": " ".join(f"{lr:g}" for lr in sweep.lrs),
            "parametrisations": " ".join(sweep.parametrisations),
            "config": json.dumps(asdict(sweep), sort_keys=True),
        },
        **_stopping(sweep, cells),
    )


def _stopping(sweep: LrSweep, cells: Sequence[LrCell]) -> dict[str, Any]:
    """Fields of a SweepKind whose trials may be stopped."""
    settings = sweep.early_stop
    if settings is None:
        return {}
    from sweeps.early_stop import CurveASHA, StoppableTrial, stoppable

    curves = {cell.cell_id: f"{cell.group}-s{cell.seed}" for cell in cells}
    longest = max(cell.steps for cell in cells)
    return {
        "trial": StoppableTrial,
        "scheduler": lambda: CurveASHA(settings, longest),
        "extend": lambda cell_id, spec: stoppable(spec, settings, curves[cell_id]),
    }


def _parser() -> argparse.ArgumentParser:
    parser = sweep_parser("sweeps.mup_lr", __doc__, "conf/sweep/mup_lr.yaml")
    parser.add_argument("--near", type=int, default=NEAREST, help="rates each parabola goes through")
    parser.add_argument("--bootstrap", type=int, default=2000, help="replicates of the intervals")
    parser.add_argument("--out", metavar="DIR", help="folder of figure and JSON (default: runs_dir/NAME)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 complete, 1 some cells failed, 2 bad input, 130 interrupted."""
    args = _parser().parse_args(argv)

    def run(sweep: LrSweep, folder: Path) -> bool:
        result = run_lr_sweep(sweep, args.resume, args.cores)
        report(result, folder, args.near, args.bootstrap)
        return result.complete

    return run_command(args, load_lr_sweep, _dry_run, run)


def report(result: SweepResult, folder: Path, near: int, replicates: int) -> LrAnalysis:
    """Fit what a sweep has, print it, and bring it to `folder` and to MLflow.

    Raises:
        FitError: settings of the fit out of range.
    """
    from sweeps.lr_report import log_lr_fit, lr_runs, lr_text, write_files

    analysis = analyse_lr(lr_runs(result.rows), near, replicates)
    print(lr_text(analysis))
    files = write_files(analysis, folder)
    ids = log_lr_fit(analysis, result.experiment, result.parent_run_id)
    failed = [row for row in result.rows if row["status"] in ("failed", "missing")]
    if failed:
        print(f"{len(failed)} cells failed (tag scalewright.error of their runs says why); --resume tries them again")
    print(f"wrote {' and '.join(str(file) for file in files)}")
    print(f"MLflow experiment {result.experiment}, parent run {result.parent_run_id}, fits {', '.join(ids)}")
    return analysis


def _dry_run(sweep: LrSweep) -> int:
    cells = build_lr_grid(sweep, read_corpus(sweep.common.data.dir))
    print(lr_grid_table(cells))
    print(f"{len(cells)} cells, {sum(cell.flops for cell in cells):.3g} FLOPs; nothing was run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
