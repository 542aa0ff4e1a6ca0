"""From a finished sweep to a decision: fit it, choose the run for a budget, write its forecast down, write its config.

Examples:
    python -m sweeps.decide --config conf/sweep/demo.yaml --budget 3.6e12 --out runs/demo
    python -m sweeps.decide --config conf/sweep/demo.yaml --budget 3.6e12 --processes 2 --out runs/demo
    python -m recipes.pretrain fit --config runs/demo/run.yaml
    python -m sweeps.report --decision runs/demo

Writes into --out: fit.json, isoflop.png, scaling.png, forecast.json and run.yaml, a config for recipes.pretrain whose
run has the forecast's size and length and all else by the sweep's rules. The forecast is also an MLflow run, made
before the training run. Called again for the same sweep and budget, it keeps the forecast that was made first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from lm.errors import ConfigError
from lm.plan import count_parameters
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps.config import SweepConfig, load_config
from sweeps.grid import Cell, build_grid, grid_id
from sweeps.isoflop import read_corpus
from sweeps.scaling.approaches import APPROACHES
from sweeps.settings import settings_of


def decide(config_path: Path, budget: float, processes: int, out: Path, approach: str | None = None) -> dict[str, Any]:
    """Fit, forecast and planned run of one sweep; see the module's text for what it writes.

    Returns:
        The content of forecast.json.

    Raises:
        ConfigError: the sweep is unfinished or unknown, or the run cannot be built.
        ValueError: no approach can answer, with each reason.
    """
    from sweeps.fit import fit_experiment
    from sweeps.forecast_record import log_forecast
    from sweeps.forecasting import make_forecast
    from sweeps.planned import plan_run, run_config
    from sweeps.plots import plot_all

    config = load_config(config_path)
    corpus = read_corpus(config.data.dir)
    cells = build_grid(config, corpus)
    parent = finished_sweep(config, cells, settings_of(config, corpus), config_path)
    key = _key(grid_id(cells), budget, processes, approach)
    kept = _kept(out, key, parent)
    if kept is not None:
        print(f"forecast {kept['forecast_id']} of this sweep and budget is kept: {out / 'forecast.json'}")
        return kept
    report = fit_experiment(
        f"mlflow:{config.experiment}", budgets=[budget], mlflow_experiment=config.experiment, parent_run_id=parent
    )
    print(report.text())
    result = report.analysis.results[approach] if approach else report.best
    cell = plan_run(config, corpus, result.model.n_opt(budget), budget, processes)
    forecast = make_forecast(
        report, budget, [cell.model], cell.sequence_length, cell.global_batch_tokens, approach=approach
    )
    forecast = log_forecast(forecast, config.experiment, parent)
    print(forecast.text())
    _report_cell(cell)
    out.mkdir(parents=True, exist_ok=True)
    plot_all(report.analysis, out)
    write_text(out / "fit.json", json.dumps(report.as_dict(), indent=1))
    run = run_config(cell, config, f"{config.name}-{forecast.forecast_id}", processes, forecast.forecast_id)
    write_text(out / "run.yaml", yaml.safe_dump(run, sort_keys=False))
    content = asdict(forecast) | {"key": key, "sweep": parent, "experiment": config.experiment, "run": run["name"]}
    write_text(out / "forecast.json", json.dumps(content, indent=1))  # last: its presence says that all is there
    return content


def finished_sweep(config: SweepConfig, cells: Sequence[Cell], settings: Mapping[str, str], config_path: Path) -> str:
    """MLflow run of the finished sweep that has these cells.

    Raises:
        ConfigError: there is none, or it is unfinished.
    """
    from plugins.loggers.sweep_ledger import SweepLedger
    from plugins.loggers.tracking import absolute_uri, check_store, tracking_uri
    from sweeps.resume import choose_parent

    uri = absolute_uri(tracking_uri())
    check_store(uri)
    choice = choose_parent(SweepLedger(uri, config.experiment), config, cells, True, settings)
    if choice.missing or choice.run_id is None:
        raise ConfigError(
            f"{choice.message}; first run: python -m sweeps.isoflop --config {config_path}"
            f"{' --resume' if choice.run_id else ''}"
        )
    return choice.run_id


def _key(grid: str, budget: float, processes: int, approach: str | None) -> str:
    return hashlib.sha256(json.dumps([grid, budget, processes, approach]).encode()).hexdigest()[:12]


def _kept(out: Path, key: str, parent: str) -> dict[str, Any] | None:
    path = out / "forecast.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None  # damaged: it is decided anew
    if not isinstance(content, dict):
        return None
    return content if (content.get("key"), content.get("sweep")) == (key, parent) else None


def _report_cell(cell: Cell) -> None:
    print(
        f"planned run: d_model {cell.model.d_model}, {count_parameters(cell.model).total:,} parameters in all, "
        f"{cell.tokens:,} tokens in {cell.steps:,} steps of {cell.sequences} sequences"
    )


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.decide`."""
    p = command_parser("sweeps.decide", __doc__)
    p.add_argument("--config", type=Path, required=True, metavar="FILE", help="of the finished sweep")
    p.add_argument("--budget", type=float, required=True, metavar="FLOPS", help="of the planned run")
    p.add_argument("--processes", type=int, default=1, metavar="N", help="devices of the planned run")
    p.add_argument("--approach", choices=list(APPROACHES), help="fit to decide by; default: the preferred one")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for fit, forecast and config")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a decision, 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments))


def _command(arguments: argparse.Namespace) -> None:
    if not (math.isfinite(arguments.budget) and arguments.budget > 0):
        raise ConfigError(f"--budget is {arguments.budget:g}; give FLOPs above 0")
    if arguments.processes < 1:
        raise ConfigError(f"--processes is {arguments.processes}; give 1 or more")
    check_places((), (arguments.out,))
    decide(arguments.config, arguments.budget, arguments.processes, arguments.out, arguments.approach)
    print(f"next: python -m recipes.pretrain fit --config {arguments.out / 'run.yaml'}")


if __name__ == "__main__":
    sys.exit(main())
