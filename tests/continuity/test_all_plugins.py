"""All plugins in one run: stages, annealing, ramp, guard with a roll-back, dashboard, integrity, samples; and kills."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.continuity.kill_harness import assert_same_end, run_killed
from tests.continuity.launch import Tracer, histories, write_experiment

# 4 steps of 128 tokens, then 256: with the ramp below these are the samples of the steps 10, 11 and 12.
POISONED = range(56, 80)
CALLBACKS: list[tuple[str, dict[str, Any]]] = [
    ("throughput.Throughput", {}),
    ("integrity.Integrity", {"every_n_steps": 5}),
    ("dashboard.Dashboard", {"every_n_steps": 2}),
    ("spike_guard.SpikeGuard", {"warmup": 4, "strikes": 3, "strike_window": 20, "margin_steps": 0}),
    ("samples.Samples", {"prompts": ["a"], "every_n_steps": 6, "max_new_tokens": 4}),
    ("wsd_anneal.WSDAnneal", {"weights": {"code": 1.0}}),
    (
        "long_context.LongContext",
        {"stages": [{"from_tokens": 512 + 10 * 256, "sequence_length": 64, "rope_theta": 20000.0}]},
    ),
    ("checkpoint.PeriodicCheckpoint", {"every_n_steps": 3}),
]


def poison(tracer: Tracer) -> None:
    """The gradients of some samples are 1e4 times too large, whenever they are read."""
    from lm.module import LlamaModule

    training_step = LlamaModule.training_step

    def poisoned(module: Any, *args: Any) -> Any:
        samples = module.trainer.datamodule.order.step_samples(module.trainer.global_step)
        loss = training_step(module, *args)
        return loss * 1e4 if any(int(k) in POISONED for k in samples) else loss

    LlamaModule.training_step = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("strategy", "world_size", "kills"),
    [("single", 1, 2), *(pytest.param(name, 2, 9, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "zero2"))],
)
def test_a_killed_run_with_all_plugins_ends_as_the_whole_one(
    strategy: str, world_size: int, kills: int, tmp_path: Path
) -> None:
    write_experiment(
        tmp_path,
        steps=24,
        every=3,
        validate_every=4,
        callbacks=[
            {"class_path": f"plugins.callbacks.{name}", "init_args": arguments} for name, arguments in CALLBACKS
        ],
        data={"batch_ramp": [[0, 128], [512, 256]]},
        optim={"schedule": {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.25}},
    )
    hit = run_killed(tmp_path, world_size, kills, ["--trainer.strategy", strategy], prepare=poison)
    assert sum(hit.values()) == kills
    assert_same_end(tmp_path, world_size)
    name = f"killed-{world_size}"
    (back,) = json.loads((tmp_path / "runs" / name / "spike_guard.json").read_text())["roll_backs"]
    assert (back["first_strike"], back["last_strike"], back["to_step"]) == (9, 11, 9)
    found = histories(tmp_path, name)
    assert sorted(found["loss"]) == list(range(1, 27)), "a step's loss is missing"
    assert max(found["grad_norm"].values()) < 100, "points of the branch that was given up are left"
    assert sorted(found["val_loss"]) == sorted(found["val_loss_long"]) == [4, 8, 12, 16, 20, 24, 26]
    assert {"loss/prose", "loss/code", "attention_logit/block_00", "log_z", "update_ratio/block_00"} <= found.keys()
    assert [path.name for path in sorted((tmp_path / "runs" / name / "samples").iterdir())] == [
        f"step-{step:08d}.txt" for step in (6, 12, 18, 24, 26)
    ]
