"""Fits scaling to a table of runs: exponents, size, tokens and loss at target budgets, with intervals.

Examples:
  python -m sweeps.fit --runs mlflow:scalewright-demo --budget 3.6e12 --mlflow
  python -m sweeps.fit --runs runs.csv --approach all --budget 1e21 4e21
  python -m sweeps.fit --runs runs.csv --approach parametric --columns.n params --columns.d tokens --json fit.json
  python -m sweeps.fit --runs grid.csv --approach isoflop --near all --where 'experiment == "llama_3"' --budget 3.8e25
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places, write_text
from sweeps import answers
from sweeps.fit_report import FitReport
from sweeps.records import CSV_COLUMNS, OPTIONAL_COLUMNS, PARENT, read_runs
from sweeps.scaling.analysis import Analysis, analyse
from sweeps.scaling.approaches import APPROACHES
from sweeps.scaling.isoflop import NEAREST
from sweeps.scaling.table import RunTable

DEFAULT_REACH = 4.0
LARGEST_RATIO = 100.0  # of C and 6 N D, either way: attention and embeddings make less of a difference


def fit_experiment(
    runs: str | RunTable,
    approach: str = "all",
    budgets: Sequence[float] = (),
    bootstrap: int = 1000,
    seed: int = 0,
    near: int | None = NEAREST,
    max_excess: float | None = None,
    noise_sd: float | None = None,
    columns: Mapping[str, str | None] | None = None,
    where: str | None = None,
    mlflow_experiment: str | None = None,
    parent_run_id: str | None = None,
    tracking_uri: str | None = None,
) -> FitReport:
    """Reads runs, fits, and logs the fit when asked to: what the command line does, for other programs.

    Args:
        runs: `mlflow:EXPERIMENT`, a CSV file, or a table.
        approach: a key of `approaches.APPROACHES`, or `all`.
        budgets: target FLOPs; empty means 4 times the largest swept budget.
        bootstrap: replicates; 0 gives no intervals.
        seed: of starts and resampling.
        near: points per parabola nearest the lowest; None takes all.
        max_excess: approach 3 leaves out runs whose loss is further (relative) above their budget's lowest.
        noise_sd: known sd of ln loss of one run; None estimates it.
        columns, where: see `records.read_runs`.
        mlflow_experiment: log each approach's fit as a run of this experiment.
        parent_run_id: read only this sweep's cells, and nest the fit runs under it.
        tracking_uri: of MLflow; None takes MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.

    Returns:
        A report; `report.best` is the preferred result, `report.text()` the printed table.

    Raises:
        ValueError: bad input, in one line. FitError (a ValueError): no approach can answer, with each reason.
    """
    check_options(budgets, bootstrap, seed, max_excess, noise_sd)
    if isinstance(runs, RunTable):
        table, source = runs, "run table"
    else:
        table, source = read_runs(runs, columns, where, tracking_uri, parent_run_id), runs
    names = None if approach == "all" else (approach,)
    targets = list(budgets) or [DEFAULT_REACH * float(table.budgets.max())] if len(table) else []
    analysis = analyse(
        table, names, targets, bootstrap=bootstrap, seed=seed, near=near, max_excess=max_excess, noise_sd=noise_sd
    )
    report = FitReport(source, analysis, bootstrap, {})
    if not analysis.results:
        analysis.best  # noqa: B018  raises with every reason
    if mlflow_experiment is not None:
        from sweeps.mlflow_fits import log_fit

        report.mlflow_run_ids.update(log_fit(report, mlflow_experiment, parent_run_id, tracking_uri))
    return report


def check_options(
    budgets: Sequence[float], bootstrap: int, seed: int, max_excess: float | None, noise_sd: float | None
) -> None:
    """Raises ConfigError, in the command's words, before anything is read."""
    for budget in budgets:
        if not (math.isfinite(budget) and budget > 0):
            raise ConfigError(f"--budget is {budget:g}; give FLOPs above 0")
    for name, value in (("--max-excess", max_excess), ("--noise-sd", noise_sd)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value:g}; give a number above 0, such as .01")
    if bootstrap < 0 or bootstrap == 1:
        raise ConfigError(f"--bootstrap is {bootstrap}; give 2 replicates or more, or 0 for no intervals")
    if seed < 0:
        raise ConfigError(f"--seed is {seed}; give 0 or more")


def parser() -> argparse.ArgumentParser:
    """Command line of `python -m sweeps.fit`."""
    p = command_parser("sweeps.fit", __doc__)
    add_run_arguments(p)
    p.add_argument("--budget", type=float, nargs="+", default=[], metavar="FLOPS", help="target budgets to decide for")
    p.add_argument("--target-loss", type=float, metavar="L", help="with --inference-tokens: nats per token to reach")
    p.add_argument("--inference-tokens", type=float, nargs="+", default=[], metavar="I", help="tokens to be served")
    p.add_argument("--repeats", action="store_true", help="fit what repeated tokens are worth (column unique_tokens)")
    p.add_argument(
        "--rates", type=float, nargs=2, action="append", default=[], metavar=("N", "D"),
        help="learning rate and batch at N and D, from runs at several learning rates",
    )  # fmt: skip
    p.add_argument("--json", type=Path, metavar="FILE", help="write every number here as JSON")
    p.add_argument("--plots", type=Path, metavar="DIR", help="write isoflop.png and scaling.png here")
    p.add_argument("--mlflow", action="store_true", help="log the fit to the experiment the runs came from")
    return p


def add_run_arguments(p: argparse.ArgumentParser, required: bool = True) -> None:
    """Options that `sweeps.fit`, `sweeps.forecast` and `sweeps.report` share: which runs, and how to fit them."""
    p.add_argument("--runs", required=required, metavar="FILE.csv|mlflow:EXPERIMENT", help="where the runs are")
    p.add_argument("--approach", default="all", choices=[*APPROACHES, "all"], help="how to fit; all: side by side")
    run_columns(p)
    p.add_argument("--max-excess", type=float, metavar="SHARE", help="parametric: drop runs this far above the minimum")
    p.add_argument("--noise-sd", type=float, metavar="SD", help="known sd of ln loss of one run; else estimated")
    p.add_argument("--bootstrap", type=int, default=1000, metavar="K", help="replicates")


def run_columns(p: argparse.ArgumentParser) -> None:
    """Options that say where the quantities are in the runs and which runs count, of every command that reads runs."""
    for key, meaning in (
        ("n", "of parameters"), ("d", "of tokens"), ("c", "of FLOPs (without one: 6 N D)"),
        ("loss", "of loss in nats per token"), ("budget", "of IsoFLOP budgets (without one: grouped by FLOPs)"),
        ("run", "that names runs"), ("lr", "of learning rates"), ("batch_tokens", "of tokens a step"),
        ("d_model", "of widths"), ("n_layers", "of depths"), ("n_non_embedding", "of parameters without embeddings"),
        ("unique_tokens", "of different tokens"), ("source", "that names corpora"),
    ):  # fmt: skip
        names = OPTIONAL_COLUMNS.get(key) or (CSV_COLUMNS[key],)
        p.add_argument(f"--columns.{key}", metavar="NAME", help=f"column {meaning}; in a CSV {' or '.join(names)}")
    p.add_argument("--where", metavar="EXPR", help="keep rows for which this holds, e.g. 'd_model > 32 and seed == 0'")
    p.add_argument("--sweep", metavar="RUN_ID", help="only cells of this sweep (its MLflow parent run)")
    p.add_argument("--near", default=str(NEAREST), metavar="K|all", help="points per parabola")
    p.add_argument("--seed", type=int, default=0, help="of starts and resampling")
    p.add_argument("--tracking-uri", metavar="URI", help="MLflow; else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db")


def near_of(arguments: argparse.Namespace) -> int | None:
    """--near as a number of points; None for all."""
    text: str = arguments.near
    if text != "all" and not (text.isdecimal() and int(text) >= 3):
        raise ConfigError(f"--near is {text!r}; give a number of points from 3, or all")
    return None if text == "all" else int(text)


def fit_from_arguments(arguments: argparse.Namespace, budgets: Sequence[float], log: bool) -> FitReport:
    """Runs `fit_experiment` on parsed options.

    Raises:
        ValueError: as `fit_experiment`, and for options that do not go together.
    """
    source: str = arguments.runs
    if log and not source.startswith("mlflow:"):
        raise ValueError("--mlflow needs --runs mlflow:EXPERIMENT: a CSV has no experiment to log to")
    if arguments.sweep and not source.startswith("mlflow:"):
        raise ValueError("--sweep needs --runs mlflow:EXPERIMENT: a CSV has no sweeps to choose from")
    return fit_experiment(
        source,
        approach=arguments.approach,
        budgets=budgets,
        bootstrap=arguments.bootstrap,
        seed=arguments.seed,
        near=near_of(arguments),
        max_excess=arguments.max_excess,
        noise_sd=arguments.noise_sd,
        columns=columns_of(arguments),
        where=arguments.where,
        mlflow_experiment=source.removeprefix("mlflow:") if log else None,
        parent_run_id=arguments.sweep,
        tracking_uri=arguments.tracking_uri,
    )


def columns_of(arguments: argparse.Namespace) -> dict[str, str | None]:
    """--columns.* by quantity; None where an option was not given."""
    return {key: getattr(arguments, f"columns.{key}") for key in (*CSV_COLUMNS, *OPTIONAL_COLUMNS)}


def warn_of_mixture(table: RunTable) -> None:
    """One line when cells of several sweeps are fitted as one: they may differ in more than size and length."""
    parents = sorted({str(run.extra[PARENT]) for run in table.runs if run.extra.get(PARENT)})
    if len(parents) > 1:
        print(
            f"warning: cells of {len(parents)} sweeps are fitted together; take one with --sweep RUN_ID, of "
            f"{', '.join(parents)}",
            file=sys.stderr,
        )


def warn_of_units(table: RunTable) -> None:
    """One line when C is nowhere near 6 N D: N or D in millions, or another column."""
    ratio = float(np.median(table.c / (6 * table.n * table.d)))
    if not 1 / LARGEST_RATIO < ratio < LARGEST_RATIO:
        print(
            f"warning: C is {ratio:.3g} times 6 N D; are N, D and C in parameters, tokens and FLOPs?", file=sys.stderr
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 with a fit, 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    return exit_status(lambda: _command(arguments))


def further_answers(arguments: argparse.Namespace, analysis: Analysis) -> list[str]:
    """Lines for --inference-tokens, --repeats and --rates."""
    lines = []
    if arguments.inference_tokens:
        lines += answers.inference_lines(analysis, arguments.target_loss, arguments.inference_tokens)
    if arguments.repeats:
        lines += answers.repeat_lines(analysis.table, arguments.bootstrap, arguments.seed)
    if arguments.rates:
        lines += answers.rate_lines(analysis.table, arguments.rates, arguments.bootstrap, arguments.seed)
    return lines


def _command(arguments: argparse.Namespace) -> None:
    if bool(arguments.inference_tokens) != (arguments.target_loss is not None):
        raise ValueError("--inference-tokens and --target-loss go together")
    check_places((arguments.json,), (arguments.plots,))
    report = fit_from_arguments(arguments, arguments.budget, arguments.mlflow)
    warn_of_mixture(report.analysis.table)
    warn_of_units(report.analysis.table)
    print(report.text())
    for line in further_answers(arguments, report.analysis):
        print(line)
    if not arguments.budget:
        print(f"no --budget was given: decided for {DEFAULT_REACH:g} times the largest one")
    if arguments.json:
        write_text(arguments.json, json.dumps(report.as_dict(), indent=1))
        print(f"numbers: {arguments.json}")
    if arguments.plots:
        from sweeps.plots import plot_all

        print("figures: " + ", ".join(str(path) for path in plot_all(report.analysis, arguments.plots)))
    for name, run_id in report.mlflow_run_ids.items():
        print(f"MLflow run of {name}: {run_id}")
    if report.mlflow_run_ids:
        from sweeps.mlflow_fits import where_to_look

        experiment = arguments.runs.removeprefix("mlflow:")
        print(f"compare them at {where_to_look(experiment, arguments.tracking_uri)}")


if __name__ == "__main__":
    sys.exit(main())
