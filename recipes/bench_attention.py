"""Benchmark of packed windows: documents that end inside a window must not pay for the whole window's attention.

Forward and backward of attention over one window of many documents, over the same window as one document, turn by
turn in one process; and the same for a whole model.

Examples:
  python -m recipes.bench attention
  python -m recipes.bench attention --sequence-length 4096 --documents 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from recipes.command import command_parser


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench attention", __doc__)
    parser.add_argument("--sequence-length", type=int, default=2048, help="tokens a window")
    parser.add_argument("--documents", type=int, default=8, help="documents of the packed window, of equal lengths")
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--n-layers", type=int, default=2, help="of the whole model")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the median ratio counts")
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print the result as JSON and return it."""
    import torch

    options = build_parser().parse_args(argv)
    T = options.sequence_length
    packed = (torch.arange(T) * options.documents // T)[None]
    one = torch.zeros_like(packed)
    result = {
        "benchmark": "attention",
        "backend": _backend(packed),
        **_compare("attention", lambda ids: _attention_step(ids, options), one, packed, options.rounds),
        **_compare("model", _model_step(options), one, packed, options.rounds),
        **{key: getattr(options, key) for key in ("sequence_length", "documents", "d_model", "n_layers")},
    }
    print(json.dumps(result))
    return result


def _backend(ids: Any) -> str:
    from lm.attention import pack

    return pack(ids, tuple(ids.shape), ids.device).backend


def _compare(name: str, step: Callable[[Any], None], one: Any, packed: Any, rounds: int) -> dict[str, Any]:
    """Median over rounds of seconds(one document) / seconds(many), after a round that warms both up."""
    ratios = []
    for _ in range(rounds + 1):
        seconds = []
        for ids in (one, packed):
            start = time.perf_counter()
            step(ids)
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return {
        f"{name}_speedup": round(statistics.median(ratios[1:]), 2),
        f"{name}_speedup_each": [round(r, 2) for r in ratios[1:]],
    }


def _attention_step(ids: Any, options: argparse.Namespace) -> None:
    import torch

    from lm.attention import attention, pack

    shape = (1, options.sequence_length, max(1, options.d_model // 64), 64)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    attention(q, k, v, pack(ids, shape[:2], ids.device), 0.125).sum().backward()


def _model_step(options: argparse.Namespace) -> Callable[[Any], None]:
    import torch

    from lm.config import ModelConfig
    from lm.init import materialize
    from lm.model import Llama

    heads = max(1, options.d_model // 64)
    config = ModelConfig(vocab_size=1024, d_model=options.d_model, n_layers=options.n_layers, n_heads=heads)
    with torch.device("meta"):
        model = Llama(config)
    materialize(model, config, 0, torch.device("cpu"))
    tokens = torch.randint(0, 1024, (1, options.sequence_length))

    def step(ids: Any) -> None:
        model(tokens, ids, tokens).mean().backward()
        model.zero_grad()

    return step
