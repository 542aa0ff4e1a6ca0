"""Benchmark of the spike guard: seconds of a step with it over seconds without it, in one run, turn by turn.

The run is the recipe's own with its default callbacks. Every few steps the guard is taken out of it or put back, so
that a machine whose speed drifts is fair to both sides. Beside the wall clock: the same ratio of the process' own CPU
seconds, which other processes disturb less, and "inside", the seconds that the guard's calls take as a share of a step.

Examples:
  python -m recipes.bench guard
  python -m recipes.bench guard --d-model 128 --sequence-length 128 --rounds 41
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.bench_step import SIZES, add_sizes, run_config, write_data
from recipes.command import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench guard", __doc__)
    add_sizes(parser)
    parser.add_argument("--rule", default="robust", help="robust, ema or sigma")
    parser.add_argument("--steps", type=int, default=2, help="steps of each side in a round")
    parser.add_argument("--rounds", type=int, default=41, help="rounds; the median ratio counts")
    parser.add_argument("--accelerator", default="cpu", help="cpu or cuda")
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print the result as JSON and return it."""
    options = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(Path(temporary), options)
    print(json.dumps(result))
    return result


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The median over rounds of guarded / unguarded seconds, and the seconds inside the guard as a share of a step."""
    from plugins.callbacks.spike_guard import SpikeGuard
    from recipes.build import build

    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    write_data(folder, options)
    config = run_config(folder, options, options.steps * 2 * (options.rounds + 1))
    guard = SpikeGuard(options.rule, warmup=options.steps)
    config["trainer"] |= {"accelerator": options.accelerator}
    parts = build(config)
    trainer: Any = parts.trainer
    turns = _turns(options, guard)
    trainer.callbacks = [guard, *trainer.callbacks, turns]
    trainer.fit(parts.module, datamodule=parts.data)
    step_seconds = statistics.median(turns.seconds[False]) / options.steps
    return {
        "benchmark": "guard",
        "overhead": _overhead(turns.seconds),
        "cpu_overhead": _overhead(turns.cpu_seconds),
        "ratio_each": [round(ratio, 4) for ratio in _ratios(turns.seconds)],
        "inside": round(statistics.median(turns.inside) / step_seconds, 5),
        "step_seconds": round(step_seconds, 5),
        "accepted_steps": guard.rule.accepted,
        "skipped_steps": guard.skipped_steps,
        **{key: getattr(options, key) for key in ("rule", *SIZES)},
    }


def _ratios(seconds: dict[bool, list[float]]) -> list[float]:
    return [guarded / free for guarded, free in zip(seconds[True], seconds[False], strict=True)]


def _overhead(seconds: dict[bool, list[float]]) -> float:
    return round(statistics.median(_ratios(seconds)) - 1, 4)


def _turns(options: argparse.Namespace, guard: Any) -> Any:
    """A callback that takes the guard out of the run and puts it back, every `steps` steps, and keeps the time."""
    from lightning.pytorch import Callback

    class Turns(Callback):
        def __init__(self) -> None:
            self.seconds: dict[bool, list[float]] = {True: [], False: []}
            self.cpu_seconds: dict[bool, list[float]] = {True: [], False: []}
            self.inside: list[float] = []
            self.started = self.cpu_started = self.spent = 0.0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (self.judge,) = trainer.strategy.guards
            self.timed_judge = self.timed(self.judge)
            guard.on_train_batch_end = self.timed(guard.on_train_batch_end)
            self.turn(trainer, True)

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step % options.steps != 0:
                return
            seconds, cpu_seconds = time.perf_counter() - self.started, time.process_time() - self.cpu_started
            guarded = bool(trainer.strategy.guards)
            if trainer.global_step > 2 * options.steps:  # the first round warms both sides up
                self.seconds[guarded].append(seconds)
                self.cpu_seconds[guarded].append(cpu_seconds)
                if guarded:
                    self.inside.append(self.spent / options.steps)
            self.turn(trainer, not guarded)

        def turn(self, trainer: Any, guarded: bool) -> None:
            trainer.strategy.guards = [self.timed_judge] if guarded else []
            others = [callback for callback in trainer.callbacks if callback is not guard]
            trainer.callbacks = [guard, *others] if guarded else others
            self.spent, self.started, self.cpu_started = 0.0, time.perf_counter(), time.process_time()

        def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
            def timed_call(*arguments: Any) -> Any:
                start = time.perf_counter()
                result = call(*arguments)
                self.spent += time.perf_counter() - start
                return result

            return timed_call

    return Turns()
