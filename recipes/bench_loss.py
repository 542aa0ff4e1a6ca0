"""Benchmark of the loss: peak memory of its forward and backward above inputs, weight and their gradients.

The chunked loss of lm.loss, and the plain one on the full table of logits, each in a process of its own, whose
resident memory is watched. Values and gradients of the two are compared, with a z-loss and a soft-cap.

Examples:
  python -m recipes.bench loss
  python -m recipes.bench loss --vocab-size 32000 --tokens 8192 --no-plain
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from recipes.command import command_parser

_Z_LOSS, _SOFTCAP = 1e-4, 30.0


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench loss", __doc__)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True, help="run the plain loss too")
    parser.add_argument("--side", choices=("chunked", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print the result as JSON and return it."""
    options = build_parser().parse_args(argv)
    if options.side:
        return _measure_side(options)
    with tempfile.TemporaryDirectory() as folder:
        sides = {side: _in_process(argv, side, Path(folder)) for side in ("chunked", "plain")[: 1 + options.plain]}
        result = {
            "benchmark": "loss",
            **{f"{side}_{key}": value for side, figures in sides.items() for key, value in figures.items()},
            "full_logits_mb": round(options.tokens * options.vocab_size * 4 / 1e6),
            **(_differences(Path(folder)) if options.plain else {}),
            **{key: getattr(options, key) for key in ("vocab_size", "tokens", "d_model")},
        }
    print(json.dumps(result))
    return result


def _in_process(argv: list[str], side: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "recipes.bench", "loss", *argv, "--side", side, "--out", str(folder / side)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _measure_side(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, options.tokens, options.d_model, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(options.vocab_size, options.d_model, generator=generator)).requires_grad_()
    labels = torch.randint(0, options.vocab_size, (1, options.tokens), generator=generator)
    _objective(options.side, x[:, :8], weight[:64], labels[:, :8] % 64)  # kernels and thread pools are in memory
    with PeakMemory() as memory:
        start = time.perf_counter()
        loss = _objective(options.side, x, weight, labels)
        loss.backward()
        seconds = time.perf_counter() - start
    assert x.grad is not None and weight.grad is not None
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in (x, weight) if p.grad is not None)
    torch.save({"loss": loss.detach(), "x": x.grad, "weight": weight.grad}, options.out)
    result = {"peak_mb": round((memory.peak_bytes - gradients) / 1e6), "seconds": round(seconds, 2)}
    print(json.dumps(result))
    return result


def _objective(side: str, x: Any, weight: Any, labels: Any) -> Any:
    """Mean loss with soft-cap and z-loss."""
    import torch

    from lm.loss import token_nll

    if side == "chunked":
        nll, logsumexp = token_nll(x, weight, labels, softcap=_SOFTCAP)
    else:
        logits = _SOFTCAP * torch.tanh(x @ weight.T / _SOFTCAP)
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        logsumexp = logits.logsumexp(-1)
    return nll.mean() + _Z_LOSS * logsumexp.square().mean()


def _differences(folder: Path) -> dict[str, float]:
    """Relative to the plain loss: its value, and gradients by their norms."""
    import torch

    chunked, plain = (torch.load(folder / side, weights_only=True) for side in ("chunked", "plain"))
    return {
        f"{name}_difference": float(((chunked[name] - plain[name]).norm() / plain[name].norm()).item())
        for name in ("loss", "x", "weight")
    }


class PeakMemory:
    """Largest resident memory of this process inside the context, above that at its start (Linux).

    `peak_bytes` is read twice a millisecond by a thread; torch's kernels run without the interpreter's lock.
    """

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = _resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self._thread.join()
        self.peak_bytes = max(self._peak, _resident_bytes()) - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self._peak = max(self._peak, _resident_bytes())


def _resident_bytes() -> int:
    import resource

    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
