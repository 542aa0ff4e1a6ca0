"""Benchmark of communication: bytes a rank sends in an optimizer step, counted, beside lm.planner's prediction.

Real processes joined by gloo train two steps under each layout; every collective that torch dispatches is counted
(plugins/strategies/traffic.py) in the second one, two micro-batches long, as a ring would send it. The rank that sent
most is shown.

Examples:
  python -m recipes.bench traffic
  python -m recipes.bench traffic --layouts fsdp zero3 --precision bf16-mixed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

from lm.planner.activations import Numerics
from lm.planner.communication import transfers
from lm.planner.layout import Layout
from recipes.bench_ranks import SEQUENCE_LENGTH, SIZES, build_trainer, from_ranks, model_config, rank_parser, write_rank

_ACCUMULATION = 2
# Arguments of Layout; shard 0 is whatever tensor leaves.
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp", "shard": 0},
    "fsdp_every": {"strategy": "fsdp", "shard": 0, "reduce_every": True},
    "hsdp": {"strategy": "hsdp", "shard": 2},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3_twice": {"strategy": "zero3"},
    "ddp_context": {"strategy": "ddp", "context": 2},
    "fsdp_context": {"strategy": "fsdp", "shard": 0, "context": 2},
    "fsdp_tensor": {"strategy": "fsdp", "shard": 0, "tensor": 2},
    "hsdp_tensor": {"strategy": "hsdp", "shard": 1, "tensor": 2},
}


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = rank_parser("traffic", __doc__)
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print a table (stderr) and the result as JSON (stdout), and return it."""
    options = build_parser().parse_args(argv)
    if options.folder:
        return write_rank(options, {name: train_and_count(options, name) for name in options.layouts})
    ranks = from_ranks("traffic", argv, options)
    rows = [compare(options, name, [rank[name] for rank in ranks]) for name in options.layouts]
    result = {
        "benchmark": "traffic",
        "worst_difference": max(abs(row["difference"]) for row in rows),
        "layouts": rows,
        **{key: getattr(options, key) for key in (*SIZES, "precision")},
    }
    print(_table(rows), file=sys.stderr)
    print(json.dumps(result))
    return result


def layout_of(options: argparse.Namespace, name: str) -> Layout:
    """The layout on `processes` devices: one window a micro-batch, two micro-batches."""
    values = dict(LAYOUTS[name])
    if values.get("shard") == 0:
        values["shard"] = options.processes // values.get("tensor", 1)
    return Layout(world=options.processes, micro_batch=1, accumulation=_ACCUMULATION, **values)


def predict(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Bytes sent by kind of collective."""
    layout = layout_of(options, name)
    numerics = Numerics(options.precision != "32-true", layout.sharded_module, "cpu")
    tokens = SEQUENCE_LENGTH // layout.context
    reuse = 0 if name == "zero3_twice" else 1_000_000_000
    sent: Counter[str] = Counter()
    for transfer in transfers(model_config(options), layout, tokens, numerics, reuse=reuse):
        sent[transfer.kind] += transfer.sent_bytes  # type: ignore[assignment]
    return dict(sent)


def compare(options: argparse.Namespace, name: str, ranks: list[dict[str, float]]) -> dict[str, Any]:
    """Counted on the rank that sent most, prediction, and the relative difference of their sums."""
    counted, predicted = max(ranks, key=lambda sent: sum(sent.values())), predict(options, name)
    difference = sum(counted.values()) / sum(predicted.values()) - 1
    return {"layout": name, "counted": counted, "predicted": predicted, "difference": round(difference, 4)}


def _table(rows: list[dict[str, Any]]) -> str:
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    lines = ["MB sent a step and rank: counted / predicted", f"{'layout':13s}" + "".join(f"{k:>18s}" for k in kinds)]
    for row in rows:
        pairs = [f"{row['counted'].get(k, 0) / 1e6:.3f} / {row['predicted'].get(k, 0) / 1e6:.3f}" for k in kinds]
        lines.append(f"{row['layout']:13s}" + "".join(f"{pair:>18s}" for pair in pairs) + f"{row['difference']:+9.2%}")
    return "\n".join(lines)


def train_and_count(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Two steps in this rank of a started group; bytes sent in the second, by kind."""
    from lightning.pytorch import Callback

    from lm.datamodule import TokenDataModule
    from lm.module import LlamaModule
    from plugins.strategies.traffic import Traffic

    traffic = Traffic()

    class Second(Callback):
        sent: dict[str, float]

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == _ACCUMULATION:
                traffic.bytes_of.clear()

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step == 2:
                self.sent = traffic.sent_bytes()

    layout = layout_of(options, name)
    more = {"precision": options.precision, "log_every_n_steps": 1000}
    trainer = build_trainer(options, _strategy(layout, name), second := Second(), **more)
    batch = SEQUENCE_LENGTH * layout.data_parallel * _ACCUMULATION
    data = TokenDataModule(str(options.folder / "data"), SEQUENCE_LENGTH, batch, micro_batch_size=1)
    with traffic:
        trainer.fit(LlamaModule(model_config(options)), datamodule=data)
    return second.sent


def _strategy(layout: Layout, name: str) -> Any:
    from plugins.strategies.ddp import DDP
    from plugins.strategies.deepspeed import ZeRO
    from plugins.strategies.fsdp import FSDP
    from plugins.strategies.hsdp import HSDP

    shared: dict[str, Any] = {"context_parallel": layout.context}
    if layout.strategy == "ddp":
        return DDP(**shared)
    if layout.strategy.startswith("zero"):
        reuse = {"zero_optimization": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}}
        stage: Any = int(layout.strategy[-1])
        return ZeRO(stage=stage, config=reuse if name == "zero3_twice" else None, **shared)
    shared |= {"tensor_parallel": layout.tensor, "reduce_every_micro_batch": layout.reduce_every}
    return HSDP(layout.replicate, layout.shard, **shared) if layout.strategy == "hsdp" else FSDP(**shared)
