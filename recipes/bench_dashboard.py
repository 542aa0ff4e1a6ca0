"""Benchmark of the dashboard: what looking at every n-th step adds to the time of a step.

One run of the recipe with its default callbacks and logger. Steps take turns: without a dashboard, with one that does
not look, with one that looks; the order turns too. From the medians over all rounds, with n = --every:

  overhead = ((n - 1) idle + look) / (n plain) - 1

Examples:
  python -m recipes.bench dashboard
  python -m recipes.bench dashboard --every 10 --d-model 128 --rounds 60
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from recipes.bench_step import SIZES, add_sizes, run_config, write_data
from recipes.command import command_parser

KINDS = ("plain", "idle", "look")


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench dashboard", __doc__)
    parser.add_argument("--every", type=int, default=10, help="n: steps from one look to the next")
    parser.add_argument("--score-every", type=int, default=4, help="see plugins.callbacks.dashboard.Dashboard")
    add_sizes(parser)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of three steps; medians count")
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print the result as JSON and return it."""
    options = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        seconds = measure(Path(temporary), options)
    plain, idle, look = (statistics.median(seconds[kind]) for kind in KINDS)
    result = {
        "benchmark": "dashboard",
        "every": options.every,
        "overhead": round(((options.every - 1) * idle + look) / (options.every * plain) - 1, 4),
        "look_over_plain": round(look / plain, 4),
        "idle_over_plain": round(idle / plain, 4),
        **{f"{kind}_seconds": round(statistics.median(seconds[kind]), 5) for kind in KINDS},
        **{key: getattr(options, key) for key in (*SIZES, "rounds")},
    }
    print(json.dumps(result))
    return result


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step, by kind."""
    from plugins.callbacks.dashboard import Dashboard
    from recipes.build import build

    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    write_data(folder, options)
    config = run_config(folder, options, len(KINDS) * (options.rounds + 1))
    config["trainer"] |= {"log_every_n_steps": 1_000_000}
    parts = build(config)
    turns = _turns(Dashboard(1, score_every=options.score_every))
    trainer: Any = parts.trainer
    trainer.callbacks.append(turns)
    trainer.fit(parts.module, datamodule=parts.data)
    return turns.seconds


def _turns(dashboard: Any) -> Any:
    """The last callback: after each step it takes the time, and puts the dashboard in or out for the next one."""
    from lightning.pytorch import Callback

    class Turns(Callback):
        def __init__(self) -> None:
            self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            self.kind = "plain"
            self.installed = False
            self.started = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
            seconds, step = time.perf_counter() - self.started, trainer.global_step
            if step > len(KINDS):  # the first round warms all kinds up
                self.seconds[self.kind].append(seconds)
            self.prepare(KINDS[(step + step // len(KINDS)) % len(KINDS)], trainer, pl_module)
            self.started = time.perf_counter()

        def prepare(self, kind: str, trainer: Any, pl_module: Any) -> None:
            self.kind = kind
            dashboard.every_n_steps = 1 if kind == "look" else 10**9
            wanted = kind != "plain"
            if wanted and not self.installed:
                trainer.callbacks = [dashboard, *trainer.callbacks]  # a new list: this one is being walked through
                dashboard.on_fit_start(trainer, pl_module)
            elif not wanted and self.installed:
                trainer.callbacks = [other for other in trainer.callbacks if other is not dashboard]
                dashboard.on_fit_end(trainer, pl_module)
            self.installed = wanted

    return Turns()
