"""Benchmark of activations: bytes that a forward pass keeps for backward, beside lm.planner's prediction.

One forward pass of the model and its loss in this process; torch's profiler adds up what it allocated and did not free.
Of the strategies two things matter, and both are measured: fp32 weights under autocast (single, ddp, ZeRO; the bf16
copies of the weights are counted apart, as the plan does), and weights in bf16 (what fsdp and hsdp gather).

Examples:
  python -m recipes.bench activations
  python -m recipes.bench activations --d-model 512 --sequence-length 1024
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from contextlib import nullcontext
from typing import Any

from lm.config import ModelConfig, RuntimeConfig
from lm.plan import count_parameters
from lm.planner.activations import Numerics, activation_bytes
from lm.planner.layout import CHECKPOINTING
from recipes.command import command_parser

NUMERICS = {
    "32-true": Numerics(False, False, "cpu"),
    "bf16 autocast": Numerics(True, False, "cpu"),
    "bf16 weights": Numerics(True, True, "cpu"),
}


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench activations", __doc__)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--n-layers", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--qk-norm", action="store_true")
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print a table (stderr) and the result as JSON (stdout), and return it."""
    options = build_parser().parse_args(argv)
    rows = [row(options, name, kind) for name in NUMERICS for kind in CHECKPOINTING]
    lines = ["MB kept for backward: measured / predicted"]
    for one in rows:
        pair = f"{one['measured_bytes'] / 1e6:.3f} / {one['predicted_bytes'] / 1e6:.3f}"
        lines.append(f"{one['numerics']:14s} {one['checkpointing']:10s} {pair:>20s} {one['difference']:+8.2%}")
    print("\n".join(lines), file=sys.stderr)
    result = {"benchmark": "activations", "worst_difference": max(abs(one["difference"]) for one in rows), "rows": rows}
    print(json.dumps(result))
    return result


def row(options: argparse.Namespace, name: str, checkpointing: str) -> dict[str, Any]:
    """Measured and predicted bytes of one way to compute."""
    n_heads = max(2, options.d_model // 64)
    config = ModelConfig(
        options.vocab_size, options.d_model, options.n_layers, n_heads, n_kv_heads=n_heads // 2, qk_norm=options.qk_norm
    )
    numerics = NUMERICS[name]
    measured = kept_bytes(config, options.windows, options.sequence_length, checkpointing, numerics)
    predicted = activation_bytes(config, options.windows, options.sequence_length, checkpointing, numerics)
    if name == "bf16 autocast" and checkpointing == "none":
        predicted += 2 * count_parameters(config).non_embedding  # the plan's `weights`
    return {
        "numerics": name,
        "checkpointing": checkpointing,
        "measured_bytes": measured,
        "predicted_bytes": predicted,
        "difference": round(measured / predicted - 1, 5),
    }


def kept_bytes(config: ModelConfig, windows: int, sequence_length: int, checkpointing: str, numerics: Numerics) -> int:
    """Bytes allocated and not freed by a forward pass, its batch included; on the CPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from lm.init import materialize
    from lm.model import Llama

    runtime = RuntimeConfig(attention="sdpa", activation_checkpointing=checkpointing)
    with torch.device("meta"):
        model = Llama(config, runtime)
    materialize(model, config, 0, "cpu")
    if numerics.mixed and numerics.bf16_weights:
        model.to(torch.bfloat16)

    def forward() -> Any:
        ids = torch.randint(0, config.vocab_size, (windows, sequence_length))
        return model(ids, None, ids.clone(), with_logsumexp=True)

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if numerics.mixed else nullcontext()

    with autocast():
        forward()[0].sum().backward()  # rotary tables are made once
    gc.collect()
    gc.disable()  # what something else leaves behind must not be freed, and counted, in between
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, autocast():
            kept = forward()
    finally:
        gc.enable()
    del kept
    return int(sum(event.self_cpu_memory_usage for event in profiled.key_averages()))
