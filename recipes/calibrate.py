"""Measures this machine as a device of the planner: seconds a training step spends on each kind of work.

Steps of small models of different shape are timed in turns: forward, backward, clipping, AdamW. Then the seconds that a
FLOP of matrix products, a FLOP of attention, a byte of activations, a parameter, a block and a step take are fitted to
the medians (non-negative least squares of relative errors). Shapes that were not fitted are predicted beside it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.planner.devices import Device, as_values
from lm.planner.timing import work
from recipes.files import write_text

Shape = tuple[ModelConfig, int, int]  # model, windows, tokens a window


def _shape(d_model: int, n_layers: int, vocab_size: int, windows: int, length: int) -> Shape:
    return ModelConfig(vocab_size, d_model, n_layers, max(1, d_model // 32)), windows, length


FITTED: list[Shape] = [
    _shape(64, 2, 512, 8, 64),
    _shape(64, 8, 512, 8, 64),
    _shape(64, 4, 512, 8, 512),
    _shape(128, 4, 1024, 8, 128),
    _shape(128, 4, 8192, 4, 128),
    _shape(192, 2, 1024, 2, 768),
    _shape(256, 6, 1024, 4, 128),
    _shape(384, 4, 2048, 2, 256),
]
HELD_OUT: list[Shape] = [_shape(96, 3, 1024, 16, 128), _shape(256, 4, 4096, 8, 128), _shape(192, 6, 2048, 4, 256)]


def calibrate(path: Path, seconds: float) -> str:
    """Measure for about so many seconds, write the device to a JSON file, and return what to say.

    Raises:
        ConfigError: no time to measure in.
    """
    if not seconds > 0:
        raise ConfigError(f"--seconds must be above 0, got {seconds:g}")
    fitted, held_out = _measure([*FITTED, *HELD_OUT], seconds, len(FITTED))
    rates = fit_rates([work(*shape) for shape in FITTED], fitted)
    predictions = [predict(rates, work(*shape)) for shape in HELD_OUT]
    checks = [
        {"d_model": shape[0].d_model, "n_layers": shape[0].n_layers, "measured_seconds": got, "predicted_seconds": said,
         "difference": said / got - 1}
        for shape, got, said in zip(HELD_OUT, held_out, predictions, strict=True)
    ]  # fmt: skip
    device = as_device(rates)
    write_text(path, json.dumps({"device": as_values(device), "held_out": checks}, indent=1))
    lines = [f"{device.name}: {device.tflops['fp32'] * 1e3:.1f} GFLOP/s in matrix products; wrote {path}"]
    for check in checks:
        lines.append(
            f"  not fitted: d_model {check['d_model']}, {check['n_layers']} layers: predicted"
            f" {1e3 * check['predicted_seconds']:.1f} ms a step, measured {1e3 * check['measured_seconds']:.1f} ms"
            f" ({check['difference']:+.1%})"
        )
    return "\n".join(lines)


def fit_rates(done: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Seconds a unit of each kind of work, none negative, that come nearest to the measured seconds, relatively.

    Args:
        done: work of each step, see lm.planner.timing.work; all with the same names.
        seconds: of each step.
    """
    from scipy.optimize import nnls

    names = list(done[0])
    table = np.array([[row[name] for name in names] for row in done]) / np.array(seconds)[:, None]
    scale = table.max(axis=0)
    found, _ = nnls(table / scale, np.ones(len(seconds)))
    return {name: float(rate) for name, rate in zip(names, found / scale, strict=True)}


def predict(rates: Mapping[str, float], done: Mapping[str, float]) -> float:
    """Seconds of a step."""
    return sum(rates[name] * value for name, value in done.items())


def as_device(rates: Mapping[str, float]) -> Device:
    """This machine's CPU in the planner's terms; its peak is what matrix products reached."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = f"CPU {platform.machine()}, {torch.get_num_threads()} threads"
    source = f"recipes.plan --calibrate, {datetime.date.today().isoformat()}, torch {torch.__version__}"
    tflops = 1e-12 / rates["matmul_flops"] if rates["matmul_flops"] > 0 else 1e-12
    bandwidth = 1e-9 * _copied_bytes_per_s()
    return Device(name, {"fp32": tflops}, memory / 1e9, bandwidth, bandwidth, source, dict(rates))


def _copied_bytes_per_s() -> float:
    """Read and written, by copying 64 MB a few times; the fastest counts."""
    import torch

    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        took.append(time.perf_counter() - start)
    return 2 * 4 * len(source) / min(took)


def _measure(shapes: Sequence[Shape], seconds: float, split: int) -> tuple[list[float], list[float]]:
    """Median seconds of a step of each shape, in turns: a machine that drifts is fair to all. At least 3 each."""
    steps = [_step(shape) for shape in shapes]
    for step in steps:
        step()
    took: list[list[float]] = [[] for _ in shapes]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(took[0]) < 3:
        for step, times in zip(steps, took, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    medians = [statistics.median(times) for times in took]
    return medians[:split], medians[split:]


def _step(shape: Shape) -> Callable[[], Any]:
    """One optimizer step of a model on random ids, as the recipe does it."""
    import torch

    from lm.init import materialize
    from lm.model import Llama

    config, windows, length = shape
    with torch.device("meta"):
        model = Llama(config)
    materialize(model, config, 0, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (windows, length))
    labels = ids.roll(-1, dims=1)

    def step() -> None:
        nll = model(ids, None, labels)
        (nll.sum() / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
