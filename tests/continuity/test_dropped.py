"""What the spike guard dropped and the checkpoints it goes back to, through the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from plugins.strategies import checkpoint
from plugins.strategies.checkpoint_io import read_rest
from tests.continuity.launch import Job, Tracer, fit_arguments, histories
from tests.continuity.test_stop import DDP

SHORT = ["--tokens", str(256 * 8)]
SAVING = "{class_path: plugins.callbacks.checkpoint.PeriodicCheckpoint, init_args: {every_n_steps: 2, keep: 0}}"
GUARD = "{class_path: plugins.callbacks.spike_guard.SpikeGuard, init_args: {strikes: 2, margin_steps: 0}}"
GUARDED = ["--trainer.callbacks", f"[{SAVING}, {GUARD}]"]


class NotFinite:
    """The loss of one rank is NaN in some steps (0-based), the first time that the process comes by.

    Args:
        damage: a checkpoint that gets a flipped bit in the last of these steps.
    """

    def __init__(self, rank: int, steps: tuple[int, ...], damage: Path | None = None) -> None:
        self.rank, self.steps, self.damage = rank, steps, damage

    def __call__(self, tracer: Tracer) -> None:
        from lm.module import LlamaModule

        training_step, done = LlamaModule.training_step, set()

        def step(module: Any, *args: Any) -> Any:
            loss, at = training_step(module, *args), module.trainer.global_step
            if at not in self.steps or at in done or tracer.rank != self.rank:
                return loss
            done.add(at)
            if at == self.steps[-1] and self.damage is not None:
                flip(self.damage)
            return loss * float("nan")

        LlamaModule.training_step = step


def flip(path: Path) -> None:
    """One bit of a checkpoint's tensors."""
    shard = next(path.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_loss_that_is_nan_on_one_rank_skips_the_step_on_all(folder: Path, strategy: str) -> None:
    arguments = fit_arguments(folder, f"nan-{strategy}", *SHORT, "--trainer.strategy", strategy)
    job = Job(folder, arguments, 2, NotFinite(1, (3, 4)))
    assert job.join() == [0, 0], job.output()
    assert "Traceback" not in job.output() and "skipped an optimizer step" in job.output()
    norms = histories(folder, f"nan-{strategy}")["grad_norm"]
    assert [step for step, value in norms.items() if not value < 1e3] == [4, 5]


@pytest.mark.parametrize(
    ("steps", "damaged", "words"),
    [
        pytest.param((4, 5), 4, "back from step 6 to", marks=pytest.mark.slow),
        ((2, 3), 2, "no sound checkpoint is older than the first strike, at step 3: steps are skipped only"),
    ],
)
def test_a_damaged_checkpoint_is_no_place_to_go_back_to(
    folder: Path, steps: tuple[int, int], damaged: int, words: str
) -> None:
    """Two ranks agree on it; with none left the run goes on, and can be gone on with."""
    name = f"back-{damaged}"
    checkpoints = folder / "runs" / name / "checkpoints"
    arguments = fit_arguments(folder, name, *SHORT, *DDP, *GUARDED)
    job = Job(folder, arguments, 2, NotFinite(1, steps, checkpoints / f"step-{damaged:08d}"))
    assert job.join() == [0, 0], job.output()
    said = [line for line in job.output().splitlines() if line.startswith("spike guard: ")]
    assert "is damaged: __0_0.distcp differs from its sha256" in said[2] and "(it is damaged-step-" in said[2], said
    assert words in said[3]
    assert f"damaged-step-{damaged:08d}" in os.listdir(checkpoints)
    assert sorted(histories(folder, name)["loss"]) == list(range(1, 9))


def test_a_cooldown_keeps_out_what_its_trunk_dropped(folder: Path) -> None:
    """Also from the checkpoint that the trunk went back to, which was written before; with a guard and without."""
    job = Job(folder, fit_arguments(folder, "trunk", *SHORT, *GUARDED), 1, NotFinite(0, (4, 5)))
    assert job.join() == [0], job.output()
    checkpoints = folder / "runs" / "trunk" / "checkpoints"
    assert read_rest(checkpoints / "step-00000004" / "state.pt")["TokenDataModule"]["skipped"] == []
    for step, more in ((4, GUARDED), (4, []), (6, [])):
        name = f"cooled-{step}-{len(more)}"
        line = ["fit", "--config", str(folder / "experiment.yaml"), "--name", name, *SHORT, *more]
        cooldown = ["--ckpt_path", str(checkpoints / f"step-{step:08d}"), "--model.optim.schedule.kind", "cooldown"]
        job = Job(folder, [*line, *cooldown])
        assert job.join() == [0], job.output()
        newest = checkpoint.candidates(folder / "runs" / name / "checkpoints")[0]
        assert newest.name == "step-00000008"
        assert read_rest(newest / "state.pt")["TokenDataModule"]["skipped"] == [[32, 48]], name
