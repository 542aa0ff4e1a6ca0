"""Benchmark of training steps on one GPU: tokens/s and MFU by shape, attention backend, compilation.

Real LlamaModule under Lightning's Trainer, AdamW, clipping, bf16-mixed, windows of random ids made on the device. Needs
only torch and lightning. Prints a JSON line for each combination, then a Markdown table with hardware, versions, date.

MFU is FLOPs a token by --convention (lm/plan.py: no input embedding, causal attention halved) x tokens/s over the dense
bf16 peak of the GPU, which is known for common ones and can be given: --peak-tflops.

Examples:
  python -m recipes.bench gpu --out gpu.md
  python -m recipes.bench gpu --shapes 1b --attention sdpa --micro-batch 8 --documents 4
  python -m recipes.bench gpu --device cpu --tiny
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm.config import ModelConfig, RuntimeConfig
from lm.errors import ConfigError
from lm.plan import DEFAULT_FLOP_CONVENTION, FLOP_CONVENTIONS, count_parameters, flops_per_token
from lm.planner.devices import peak_tflops
from recipes.command import command_parser

# Shape, tokens a window, windows a micro-batch.
SHAPES: dict[str, tuple[ModelConfig, int, int]] = {
    "160m": (ModelConfig(vocab_size=50_304, d_model=768, n_layers=12, n_heads=12, d_ff=2048), 2048, 16),
    "1b": (
        ModelConfig(128_256, 2048, 16, 32, n_kv_heads=8, d_ff=8192, rope_theta=500_000.0, tie_embeddings=True),
        4096,
        4,
    ),
    "tiny": (ModelConfig(vocab_size=256, d_model=64, n_layers=2, n_heads=2), 64, 2),
}

COLUMNS = ("shape", "attention", "compile", "tokens_per_s", "mfu", "peak_memory_gb", "seconds_a_step", "error")


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["160m", "1b"])
    parser.add_argument("--tiny", action="store_true", help="the tiny shape and few steps: tries the code, no figures")
    parser.add_argument("--attention", nargs="+", help="backends; those present unless given")
    parser.add_argument("--compile", choices=("both", "on", "off"), default="both")
    parser.add_argument("--micro-batch", type=int, default=0, help="windows a step; 0 is the shape's own")
    parser.add_argument("--documents", type=int, default=1, help="documents a window, of equal lengths")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each combination; the median counts")
    parser.add_argument("--warmup", type=int, default=5, help="steps before, which compile")
    parser.add_argument("--convention", choices=list(FLOP_CONVENTIONS), default=DEFAULT_FLOP_CONVENTION)
    parser.add_argument("--peak-tflops", type=float, default=0, help="dense bf16 TFLOP/s of the GPU")
    parser.add_argument("--out", type=Path, help="also write the table here")
    return parser


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Measure, print a JSON line each and the table; return the rows.

    Raises:
        ConfigError: no GPU.
    """
    import torch

    options = build_parser().parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device, there is none; --device cpu --tiny tries the code without")
    if options.tiny:
        options.shapes, options.steps, options.warmup = ["tiny"], min(options.steps, 3), 1
    rows = []
    for shape in options.shapes:
        for attention in options.attention or present_backends(options.device):
            for compiled in {"both": (False, True), "on": (True,), "off": (False,)}[options.compile]:
                rows.append(measure(shape, attention, compiled, options))
                print(json.dumps(rows[-1]), flush=True)
    text = table(rows, options)
    print(f"\n{text}")
    if options.out:
        options.out.write_text(text)
    return rows


def present_backends(device: str) -> list[str]:
    """Backends of lm.attention that can train here. documents is left to CPUs: it launches a kernel a document."""
    if device == "cpu":
        return ["sdpa", "documents"]
    return ["sdpa", "flex", *(["flash"] if find_spec("flash_attn") is not None else [])]


def measure(shape: str, attention: str, compiled: bool, options: argparse.Namespace) -> dict[str, Any]:
    """A row; where memory did not suffice it has an error instead of figures."""
    import torch

    config, T, windows = SHAPES[shape]
    windows = options.micro_batch or windows
    row: dict[str, Any] = {"shape": shape, "attention": attention, "compile": compiled}
    torch._dynamo.reset()
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = statistics.median(_step_seconds(config, RuntimeConfig(attention, compiled), T, windows, options))
    except torch.OutOfMemoryError:
        return {**row, "error": f"out of memory at {windows} windows; try --micro-batch {max(1, windows // 2)}"}
    finally:
        if options.device == "cuda":
            torch.cuda.empty_cache()
    tokens_per_s = windows * T / seconds
    peak = 1e12 * (options.peak_tflops or peak_tflops(device_name(options.device)))
    flops = flops_per_token(config, T, options.convention) * tokens_per_s
    memory = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    return {
        **row,
        "tokens_per_s": round(tokens_per_s),
        "mfu": round(flops / peak, 4) if peak else None,
        "mfu_convention": options.convention,
        "peak_memory_gb": round(memory / 1e9, 2) if memory else None,
        "seconds_a_step": round(seconds, 5),
        "n_params": count_parameters(config).total,
        "sequence_length": T,
        "windows": windows,
        "documents": options.documents,
    }


def _step_seconds(
    config: ModelConfig, runtime: RuntimeConfig, T: int, windows: int, options: argparse.Namespace
) -> list[float]:
    """Seconds of each timed optimizer step."""
    import torch
    from lightning.pytorch import Callback, Trainer

    from lm.module import LlamaModule
    from plugins.strategies.single import Single

    class Clock(Callback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            if trainer.global_step >= options.warmup:
                if options.device == "cuda":
                    torch.cuda.synchronize()
                self.marks.append(time.perf_counter())

    clock = Clock()
    steps = options.warmup + options.steps
    trainer = Trainer(
        accelerator=options.device,
        devices=1,
        strategy=Single(),
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        max_steps=steps,
        log_every_n_steps=steps,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(LlamaModule(config, runtime=runtime), _windows(config, T, windows, steps, options))
    return [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]


def _windows(config: ModelConfig, T: int, windows: int, steps: int, options: argparse.Namespace) -> Any:
    """`steps` batches of random ids, in the form of lm.datamodule's."""
    import torch

    ids = torch.randint(0, config.vocab_size, (windows, T + 1), device=options.device)
    batch = {
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "document_ids": (torch.arange(T) * options.documents // T).expand(windows, T).contiguous(),  # read on the host
        "loss_tokens": float(windows * T),
    }
    return torch.utils.data.DataLoader([batch] * steps, batch_size=None)  # type: ignore[arg-type]


def device_name(device: str) -> str:
    """Of the GPU, or of the processor."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


def table(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Markdown, with all that a reader needs to repeat it."""
    import lightning
    import torch

    cuda = f", CUDA {torch.version.cuda}" if options.device == "cuda" else ""
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    lines = [
        f"{device_name(options.device)}; torch {torch.__version__}{cuda}, lightning {lightning.__version__}; "
        f"{datetime.date.today().isoformat()}. bf16-mixed, AdamW; MFU convention: {options.convention}.",
        "",
        f"| {' | '.join(name.replace('_', ' ') for name in columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join('' if row.get(name) is None else str(row[name]) for name in columns)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"
