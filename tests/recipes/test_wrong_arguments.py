"""What a class of a config says of its own arguments reaches the user as one line that names what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lm.errors import ConfigError
from recipes.build import parse

DATA = {"dir": "nowhere", "sequence_length": 32, "global_batch_tokens": 256}
CALLBACKS = "plugins.callbacks."

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")


def line_for(key: str, class_path: str, **arguments: Any) -> str:
    given: Any = {"class_path": class_path, "init_args": arguments}
    trainer = {"accelerator": "cpu", "precision": "32-true", key: [given] if key == "callbacks" else given}
    model = {"config": {"vocab_size": 300, "d_model": 32, "n_layers": 1, "n_heads": 2}}
    with pytest.raises(ConfigError) as caught:
        parse({"model": model, "data": DATA, "trainer": trainer})
    return str(caught.value)


@pytest.mark.parametrize(
    ("class_path", "arguments", "part"),
    [
        ("spike_guard.SpikeGuard", {"rule": "x"}, "rule 'x' is unknown; take one of robust, ema, sigma"),
        ("spike_guard.SpikeGuard", {"margin_steps": 10**12}, "margin_steps from 0 to 1000, got"),
        ("spike_guard.SpikeGuard", {"window": 10**20}, "window must be from 2 to 1000000"),
        ("dashboard.Dashboard", {"history_length": 10**20}, "history_length must be at most"),
        ("dashboard.Dashboard", {"straggler_factor": math.nan}, "straggler_factor must be above 1"),
        ("integrity.Integrity", {"every_n_steps": None}, "integrity.Integrity: "),
        ("samples.Samples", {"prompts": ["a"], "temperature": math.nan}, "temperature must be a number from 0 on"),
        ("samples.Samples", {"prompts": ["a"], "seed": -1}, "seed must be from 0"),
        ("samples.Samples", {}, "required: prompts"),
        (
            "young_checkpoint.YoungCheckpoint",
            {"failures_per_device_day": math.nan},
            "must be positive and finite, got nan",
        ),
        ("checkpoint.PeriodicCheckpoint", {"permanent_every_tokens": math.nan}, "must be finite and not negative"),
        ("checkpoint.PeriodicCheckpoint", {"every_n_steps": 1.5}, "Expected a <class 'int'>. Got value: 1.5"),
        ("long_context.LongContext", {"stages": [{"from_tokens": math.inf, "sequence_length": 64}]}, "from_tokens"),
        (
            "long_context.LongContext",
            {"stages": [{"from_tokens": 9, "sequence_length": 64, "rope_scaling": {"kind": "linear", "factor": 0.5}}]},
            "rope_scaling.factor must be at least 1, got 0.5",
        ),
    ],
)
def test_of_callbacks(class_path: str, arguments: dict, part: str) -> None:
    line = line_for("callbacks", CALLBACKS + class_path, **arguments)
    assert part in line and "\n" not in line and "Union" not in line and "Namespace" not in line


def test_of_strategy_and_logger() -> None:
    assert "context_parallel must be at least 1" in line_for(
        "strategy", "plugins.strategies.ddp.DDP", context_parallel=0
    )
    logger = "plugins.loggers.mlflow.MLflowLogger"
    assert "experiment must be a name" in line_for("logger", logger, experiment="")
    assert "flush_seconds must be from 0" in line_for("logger", logger, flush_seconds=math.inf)


def test_a_callback_given_twice() -> None:
    guard = {"class_path": CALLBACKS + "spike_guard.SpikeGuard"}
    with pytest.raises(ConfigError, match="names SpikeGuard twice; keep one"):
        parse(
            {
                "model": {"config": {"vocab_size": 300, "d_model": 32, "n_layers": 1, "n_heads": 2}},
                "data": DATA,
                "trainer": {"accelerator": "cpu", "callbacks": [guard, guard]},
            }
        )
