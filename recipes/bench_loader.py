"""Benchmark of the training loader: tokens per second on one core through the real DataLoader path.

Examples:
  python -m recipes.bench loader
  python -m recipes.bench loader --dir data/demo --sequence-length 128 --micro-batch-size 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recipes.command import command_parser

SYNTHETIC_TOKENS = 20_000_000
WARM_UP_BATCHES = 50


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench loader", __doc__)
    parser.add_argument("--dir", type=Path, help="prepared data folder (default: random ids, 20M tokens, 3 sources)")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens a window")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="windows a batch")
    parser.add_argument("--accumulate", type=int, default=4, help="batches an optimizer step")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements; the median counts")
    return parser


def synthetic_folder(folder: Path) -> None:
    """Random ids in three sources of documents of 300 tokens."""
    from lm.data.synthetic import random_documents, write_folder

    sources = {
        name: {
            "train": random_documents(SYNTHETIC_TOKENS // 3, 1024, 300, seed),
            "validation": random_documents(100_000, 1024, 300, seed + 10),
        }
        for seed, name in enumerate(("prose", "reference", "code"))
    }
    write_folder(folder, sources, vocab_size=1024)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second: median, and each measurement."""
    import torch

    from lm.datamodule import TokenDataModule

    torch.set_num_threads(1)
    batch_tokens = options.sequence_length * options.micro_batch_size
    module = TokenDataModule(
        str(folder),
        sequence_length=options.sequence_length,
        global_batch_tokens=batch_tokens * options.accumulate,
        micro_batch_size=options.micro_batch_size,
        num_workers=options.num_workers,
    )
    module.setup("fit")
    batches = iter(module.train_dataloader())
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    rates = []
    for _ in range(options.repeats):
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < options.seconds:
            next(batches)
            count += 1
        rates.append(count * batch_tokens / (time.perf_counter() - start))
    return {
        "benchmark": "loader",
        "tokens_per_s": round(statistics.median(rates)),
        "tokens_per_s_each": [round(rate) for rate in rates],
        "sequence_length": options.sequence_length,
        "micro_batch_size": options.micro_batch_size,
        "num_workers": options.num_workers,
        "data": str(options.dir or "synthetic"),
    }


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print the result as JSON and return it."""
    options = build_parser().parse_args(argv)
    if options.dir is not None:
        result = measure(options.dir, options)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            synthetic_folder(Path(temporary) / "data")
            result = measure(Path(temporary) / "data", options)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    run(sys.argv[1:])
