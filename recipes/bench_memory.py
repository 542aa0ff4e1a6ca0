"""Benchmark of memory: bytes of parameters, gradients and optimizer state a rank holds, beside lm.plan's prediction.

Real processes joined by gloo train two steps under each strategy; each rank walks its tensors right before the
second optimizer step (plugins/strategies/memory.py says what counts). The largest rank is shown.

Examples:
  python -m recipes.bench memory
  python -m recipes.bench memory --d-model 128 --strategies fsdp zero3 --processes 2
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from lm.plan import MEMORY_STRATEGIES, memory_bytes
from recipes.bench_ranks import SEQUENCE_LENGTH, SIZES, build_trainer, from_ranks, model_config, rank_parser, write_rank

KINDS = ("parameters", "gradients", "optimizer_state")


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = rank_parser("memory", __doc__)
    parser.add_argument("--strategies", nargs="+", default=list(MEMORY_STRATEGIES), choices=MEMORY_STRATEGIES)
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print a table (stderr) and the result as JSON (stdout), and return it."""
    options = build_parser().parse_args(argv)
    if options.folder:
        return write_rank(options, {name: train_and_measure(options, name) for name in options.strategies})
    ranks = from_ranks("memory", argv, options)
    rows = [compare(options, strategy, [rank[strategy] for rank in ranks]) for strategy in options.strategies]
    result = {
        "benchmark": "memory",
        "worst_difference": round(max(abs(row["difference"]) for row in rows), 4),
        "strategies": rows,
        **{key: getattr(options, key) for key in SIZES},
    }
    print(_table(rows), file=sys.stderr)
    print(json.dumps(result))
    return result


def _shards(strategy: str, processes: int) -> int | None:
    """hsdp is measured as two copies."""
    return processes // 2 if strategy == "hsdp" else None


def compare(options: argparse.Namespace, strategy: str, ranks: list[dict[str, int]]) -> dict[str, Any]:
    """Largest rank, prediction, and the difference that is farthest from 0, relative to the prediction."""
    shard = _shards(strategy, options.processes)
    predicted = memory_bytes(model_config(options), strategy, options.processes, shard=shard)
    measured = {kind: max(rank[kind] for rank in ranks) for kind in (*KINDS, "other")}
    differences = [float(measured[kind] / getattr(predicted, kind) - 1) for kind in KINDS]
    worst: float = max(differences, key=abs)
    return {
        "strategy": strategy,
        "measured_bytes": measured,
        "predicted_bytes": {kind: getattr(predicted, kind) for kind in KINDS},
        "difference": round(worst, 4),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["MB a rank: measured / predicted", f"{'strategy':10s}" + "".join(f"{kind:>20s}" for kind in KINDS)]
    for row in rows:
        pairs = [
            f"{row['measured_bytes'][kind] / 1e6:.3f} / {row['predicted_bytes'][kind] / 1e6:.3f}" for kind in KINDS
        ]
        lines.append(f"{row['strategy']:10s}" + "".join(f"{pair:>20s}" for pair in pairs))
    return "\n".join(lines)


def train_and_measure(options: argparse.Namespace, name: str) -> dict[str, int]:
    """Two steps under a strategy, in this rank of a started group; what it held right before the second one."""
    import gc

    from lightning.pytorch import Callback

    import plugins.strategies
    from lm.datamodule import TokenDataModule
    from lm.module import LlamaModule
    from plugins.strategies.hsdp import HSDP
    from plugins.strategies.memory import held_bytes

    class Measure(Callback):
        held: dict[str, int]

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 1:
                self.held = held_bytes(trainer.strategy)

    gc.collect()  # what the strategy before this one left
    plugins.strategies.register()
    strategy: Any = HSDP(shard=_shards(name, options.processes)) if name == "hsdp" else name
    trainer = build_trainer(options, strategy, measure := Measure())
    data = TokenDataModule(str(options.folder / "data"), SEQUENCE_LENGTH, SEQUENCE_LENGTH * options.processes)
    trainer.fit(LlamaModule(model_config(options)), datamodule=data)
    return measure.held
