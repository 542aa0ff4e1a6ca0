"""Benchmark against a peer: tokens/s of the recipe over transformers' LlamaForCausalLM under its Trainer.

Three sides train the same shape on windows of random ids on the CPU, each with AdamW and clipping: the recipe with the
precision and compilation it picks, transformers in fp32, and transformers in bf16. Each side lives in a process of its
own, because accelerate, autocast and the allocator keep settings for a whole process; the processes take turns, a few
steps each, in an order that rotates, so that a machine whose speed drifts is fair to all. A side that is not named in
--sides is left out; "recipe-bf16" and "recipe-fp32" are the recipe told what to use, without compilation.

"matmul_share" is the part of a side's turn that matrix products take, in one profiled turn after the others: 1 over it
is the most by which anything that keeps that side's matrix products and their precision could be faster.

Examples:
  python -m recipes.bench peers
  python -m recipes.bench peers --rounds 5 --sequences 2 --sides recipe hf-fp32
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from recipes.command import command_parser

SIDES = ("recipe", "recipe-fp32", "recipe-bf16", "hf-fp32", "hf-bf16")
_FOREVER = 10**9


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench peers", __doc__)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--n-layers", type=int, default=6)
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens a window")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=4, help="windows a step")
    parser.add_argument("--steps", type=int, default=1, help="steps of each side in a turn")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the median ratio counts")
    parser.add_argument("--threads", type=int, default=0, help="of each side; 0 is torch's default")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["recipe", "hf-fp32", "hf-bf16"])
    parser.add_argument("--run-flops", type=float, default=1e18, help="length of the run that the recipe picks for")
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print the result as JSON and return it."""
    options = build_parser().parse_args(argv)
    for package in ("transformers", "accelerate"):
        if find_spec(package) is None:
            raise ConfigError(f"bench peers needs {package}: pip install 'scalewright[dev]'")
    if options.sides[0].startswith("hf"):
        raise ConfigError(f"--sides begins with the side that the others are held against, got {options.sides[0]}")
    loads = [os.getloadavg()[0]]
    seconds, notes, shares = measure(options)
    loads.append(os.getloadavg()[0])
    first = options.sides[0]
    step_tokens = options.steps * options.sequences * options.sequence_length
    result = {
        "benchmark": "peers",
        **{
            f"{first}_over_{side}{suffix}": value
            for side in options.sides[1:]
            for suffix, value in _ratios(seconds[first], seconds[side]).items()
        },
        "tokens_per_s": {side: round(step_tokens / statistics.median(seconds[side])) for side in options.sides},
        "matmul_share": shares,
        "picked": notes[first],
        "load_average": [round(load, 1) for load in loads],
        "cpu": _cpu_facts(),
        **{
            key: getattr(options, key)
            for key in ("d_model", "n_layers", "sequence_length", "vocab_size", "sequences", "threads")
        },
    }
    print(json.dumps(result))
    return result


def _ratios(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    each = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {"": round(statistics.median(each), 3), "_each": [round(ratio, 3) for ratio in each]}


def _cpu_facts() -> dict[str, Any]:
    import torch

    has = torch.cpu.get_capabilities()
    return {
        "cores": os.cpu_count(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "bf16_units": bool(has.get("amx_bf16") or has.get("avx512_bf16")),
    }


def measure(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, str], dict[str, float]]:
    """Seconds of each turn by side, after one that warms up; what each side says of itself; its share of products."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        try:
            for side in options.sides:
                pipes[side], theirs = context.Pipe()
                process = context.Process(target=_side, args=(side, theirs, options, Path(folder) / side), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes[side].recv()  # one at a time: another's start would slow the first steps
            seconds: dict[str, list[float]] = {side: [] for side in options.sides}
            for turn in range(options.rounds + 1):
                start = turn % len(options.sides)
                for side in options.sides[start:] + options.sides[:start]:
                    pipes[side].send("go")
                    took = pipes[side].recv()
                    if turn > 0:
                        seconds[side].append(took)
                if turn > 0:
                    last = ", ".join(f"{side} {seconds[side][-1]:.2f} s" for side in options.sides)
                    print(f"round {turn} of {options.rounds}: {last}", file=sys.stderr, flush=True)
            notes, shares = {}, {}
            for side in options.sides:
                pipes[side].send("note")
                notes[side] = pipes[side].recv()
                pipes[side].send("profile")
                shares[side] = round(pipes[side].recv(), 3)
        except EOFError:
            raise RuntimeError("a side of the benchmark died; its traceback is above") from None
        finally:
            for process in processes:
                process.kill()  # Lightning would take a gentler signal as a wish to stop after the step
                process.join()
    return seconds, notes, shares


class Turns:
    """One side's end of the pipe: between steps it waits for its turn and reports how long the last one took.

    A turn that is to be profiled reports its share of matrix products in place of seconds.
    """

    def __init__(self, pipe: Any, steps: int, note: str):
        self.pipe, self.steps, self.note = pipe, steps, note
        self.done, self.started = 0, 0.0
        self.profiler: Any = None

    def before_training(self) -> None:
        self.pipe.send("ready")
        self._wait()

    def after_step(self) -> None:
        self.done += 1
        if self.done % self.steps == 0:
            self.pipe.send(self._finish())
            self._wait()

    def _finish(self) -> float:
        if self.profiler is None:
            return time.perf_counter() - self.started
        self.profiler.stop()
        profiler, self.profiler = self.profiler, None
        return matmul_share(profiler.key_averages())

    def _wait(self) -> None:
        while (word := self.pipe.recv()) == "note":
            self.pipe.send(self.note)
        if word == "profile":
            from torch.profiler import ProfilerActivity, profile

            self.profiler = profile(activities=[ProfilerActivity.CPU])
            self.profiler.start()
        self.started = time.perf_counter()


def matmul_share(averages: Any) -> float:
    """Of the CPU time in torch.profiler's averages, the part inside matrix products (attention's kernels apart)."""
    products = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")
    inside = sum(event.self_cpu_time_total for event in averages if event.key in products)
    return float(inside / sum(event.self_cpu_time_total for event in averages))


def _side(side: str, pipe: Any, options: argparse.Namespace, folder: Path) -> None:
    """Body of one process: trains until it is ended."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    if side.startswith("recipe"):
        _train_recipe(side, pipe, options, folder)
    else:
        from recipes.bench_peers_hf import train

        train(Turns(pipe, options.steps, side), options, folder, bf16=side == "hf-bf16")


def _train_recipe(side: str, pipe: Any, options: argparse.Namespace, folder: Path) -> None:
    from lightning.pytorch import Callback

    from lm.data.synthetic import random_documents, write_folder
    from recipes.build import build
    from recipes.cpu import keep_freed_memory
    from recipes.pretrain import quiet

    quiet()
    keep_freed_memory()
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    tokens = 64 * options.sequence_length * options.sequences
    # One document for each split: like transformers' windows, ours are attended as a whole.
    documents = {
        split: random_documents(size, options.vocab_size, 1 << 40, seed=0)
        for split, size in (("train", tokens), ("validation", 4 * options.sequence_length))
    }
    write_folder(folder / "data", {"random": documents}, options.vocab_size)
    parts = build(_config(side, folder, options))
    turns = Turns(pipe, options.steps, parts.trainer.choice or side)  # type: ignore[attr-defined]

    class Hand(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            turns.before_training()

        def on_train_batch_end(self, *arguments: Any) -> None:
            turns.after_step()

    parts.trainer.callbacks.append(Hand())  # type: ignore[attr-defined]
    parts.trainer.fit(parts.module, datamodule=parts.data)


def _config(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from lm.config import ModelConfig
    from lm.plan import tokens_for_budget

    shape = {
        "vocab_size": options.vocab_size,
        "d_model": options.d_model,
        "n_layers": options.n_layers,
        "n_heads": max(1, options.d_model // 64),
    }
    precision = {"recipe": "auto", "recipe-fp32": "32-true", "recipe-bf16": "bf16-mixed"}[side]
    return {
        "name": "bench",
        "runs_dir": str(folder / "runs"),
        "tokens": tokens_for_budget(ModelConfig(**shape), options.run_flops, options.sequence_length),
        "model": {"config": shape, "runtime": {"compile": "auto" if side == "recipe" else False}},
        "data": {
            "dir": str(folder / "data"),
            "sequence_length": options.sequence_length,
            "global_batch_tokens": options.sequences * options.sequence_length,
            "validation_windows": 1,
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "enable_progress_bar": False,
            "precision": precision,
            "val_check_interval": _FOREVER,
            "limit_val_batches": 0,
            "callbacks": [{"class_path": "plugins.callbacks.throughput.Throughput"}],
        },
    }
