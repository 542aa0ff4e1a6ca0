"""What early stopping would have saved of a finished learning-rate sweep, and whether it would have changed the optima.

The scheduler sees the training losses that the runs logged, one run after the other in the sweep's order, as on one
core; with more at a time fewer are stopped, because fewer have reported before.

Examples:
    python -m sweeps.lr_replay --config conf/sweep/mup_lr.yaml
    python -m sweeps.lr_replay --config conf/sweep/mup_lr.yaml --grace 40 --keep 3
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from sweeps.lr_grid import EarlyStop, LrCell, build_lr_grid, load_lr_sweep
from sweeps.options import add_names, names_of

Losses = Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Replay:
    """stopped_at: step by cell id of the runs that would have ended early. steps, flops: shares not trained."""

    stopped_at: dict[str, int]
    steps: float
    flops: float


def replay(cells: Sequence[LrCell], losses: Losses, settings: EarlyStop) -> Replay:
    """Runs the scheduler over logged losses.

    Args:
        cells: in the sweep's order; those without losses are left out.
        losses: by cell id, (step, training loss) of a run that reached its end.
    """
    from ray.tune.schedulers import TrialScheduler

    from sweeps.early_stop import CurveASHA

    known = [cell for cell in cells if cell.cell_id in losses]
    scheduler = CurveASHA(settings, max(cell.steps for cell in known))
    stopped = {}
    for cell in known:
        curve = f"{cell.group}-s{cell.seed}"
        trial: Any = SimpleNamespace(trial_id=cell.cell_id, config={"spec": {"curve": curve}})
        scheduler.on_trial_add(None, trial)
        for step in range(settings.every, cell.steps, settings.every):
            window = [loss for at, loss in losses[cell.cell_id] if step - settings.every < at <= step]
            if not window:
                continue
            result = {"step": step, "loss": sum(window) / len(window)}
            if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                stopped[cell.cell_id] = step
                break
    left = {cell.cell_id: 1 - stopped.get(cell.cell_id, cell.steps) / cell.steps for cell in known}
    steps, flops = (
        sum(left[cell.cell_id] * size(cell) for cell in known) / sum(size(cell) for cell in known)
        for size in (lambda cell: cell.steps, lambda cell: cell.flops)
    )
    return Replay(stopped, steps, flops)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("sweeps.lr_replay", __doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="settings of the finished sweep")
    add_names(parser)
    for field in dataclasses.fields(EarlyStop):
        kind = float if field.name == "reduction" else int
        parser.add_argument(f"--{field.name}", type=kind, help=f"early_stop.{field.name} (default: {field.default})")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for bad input."""
    args = _parser().parse_args(argv)
    return exit_status(lambda: _command(args))


def _command(args: argparse.Namespace) -> int:
    from plugins.loggers.sweep_ledger import COMPLETE, SweepLedger
    from plugins.loggers.tracking import absolute_uri, tracking_uri
    from sweeps.grid import grid_id
    from sweeps.isoflop import read_corpus
    from sweeps.lr_report import lr_runs, lr_text
    from sweeps.mup_lr import lr_rows
    from sweeps.resume import result_rows
    from sweeps.scaling.lr_transfer import analyse_lr

    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(EarlyStop)}
    settings = EarlyStop(**{name: value for name, value in given.items() if value is not None})
    sweep = load_lr_sweep(args.config, names_of(args))
    cells = build_lr_grid(sweep, read_corpus(sweep.common.data.dir))
    ledger = SweepLedger(absolute_uri(tracking_uri()), sweep.common.experiment)
    parent = next((run for run in ledger.sweeps(sweep.common.name) if run.grid == grid_id(cells)), None)
    if parent is None:
        raise ConfigError(f"no sweep {sweep.common.name} of this grid is in MLflow: run python -m sweeps.mup_lr first")
    rows = lr_rows(result_rows(ledger, parent.run_id, cells), cells, sweep)
    losses = {row["cell_id"]: _history(ledger, row["run_id"]) for row in rows if row["status"] == COMPLETE}
    if not losses:
        raise ConfigError(f"sweep {sweep.common.name} has no complete run to go by")
    found = replay(cells, losses, settings)
    print(
        f"{len(found.stopped_at)} of {len(losses)} runs would have been stopped: {found.steps:.0%} of all steps and"
        f" {found.flops:.0%} of all FLOPs not trained\n"
    )
    print(f"as it was:\n{lr_text(analyse_lr(lr_runs(rows)))}\n")
    cut = [{**row, "status": "stopped"} if row["cell_id"] in found.stopped_at else row for row in rows]
    print(f"with early stopping:\n{lr_text(analyse_lr(lr_runs(cut)))}")
    return 0


def _history(ledger: Any, run_id: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in ledger.client.get_metric_history(run_id, "loss")]


if __name__ == "__main__":
    sys.exit(main())
