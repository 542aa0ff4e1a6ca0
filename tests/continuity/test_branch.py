"""Runs that begin from a checkpoint that is not their newest, or that have nothing left to do; two starts at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plugins.callbacks import branch, run_lock
from plugins.strategies import checkpoint
from tests.continuity.launch import Job, Tracer, fit_arguments, histories

SAVING = "[{class_path: plugins.callbacks.checkpoint.PeriodicCheckpoint, init_args: {every_n_steps: 2, keep: %d}}]"


def arguments(folder: Path, name: str, ckpt_path: str, steps: int, keep: int, *more: str) -> list[str]:
    line = ["fit", "--config", str(folder / "experiment.yaml"), "--name", name, "--ckpt_path", ckpt_path]
    return [*line, "--tokens", str(256 * steps), "--trainer.callbacks", SAVING % keep, *more]


def test_back_to_an_older_checkpoint_of_the_same_run(folder: Path) -> None:
    """What is newer gives way and stays; else the new branch's checkpoints would be removed in favour of the old's."""
    checkpoints = folder / "runs" / "branch" / "checkpoints"
    first = Job(folder, arguments(folder, "branch", "auto", 8, 0))
    assert first.join() == [0], first.output()
    back = Job(folder, arguments(folder, "branch", str(checkpoints / "step-00000002"), 5, 2))
    assert back.join() == [0], back.output()
    names = sorted(os.listdir(checkpoints))
    assert names == [f"abandoned-step-{step:08d}" for step in (4, 6, 8)] + ["step-00000004", "step-00000005"]
    assert "this run begins at step 2; a later checkpoint is renamed to" in back.output()
    assert checkpoint.candidates(checkpoints)[0].name == "step-00000005"
    assert list(histories(folder, "branch")["loss"]) == [1, 2, 3, 4, 5]

    # A run that ends before its checkpoint, and a cooldown that ends where it begins, are mistakes.
    shorter = Job(folder, arguments(folder, "branch", "last", 4, 2))
    assert shorter.join() == [2]
    assert (
        f"{checkpoints}/step-00000005 is of step 5 and the run ends after step 4: nothing is left" in shorter.output()
    )
    stem = str(checkpoints / "step-00000005")
    cooldown = Job(folder, arguments(folder, "none-left", stem, 5, 2, "--model.optim.schedule.kind", "cooldown"))
    assert cooldown.join() == [2]
    assert "nothing is left to train; raise tokens" in cooldown.output()
    assert not (folder / "runs" / "none-left").exists()


def test_a_kill_before_the_old_branch_is_forgotten_is_made_good_by_the_next_start(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        (tmp_path / f"step-{step:08d}").mkdir()
    forgotten: list[int] = []

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        branch.leave(tmp_path, 2, killed)
    assert checkpoint.candidates(tmp_path) == [tmp_path / "step-00000002"]
    assert branch.leave(tmp_path, 2, lambda: forgotten.append(2)) == [] and forgotten == [2]
    assert branch.leave(tmp_path, 2, lambda: forgotten.append(2)) == [] and forgotten == [2]  # once

    # Killed earlier, while the newest one has its name: the branch is not left, and a start goes on with it.
    (tmp_path / branch.MARK).write_text("2")
    assert branch.leave(tmp_path, 8, lambda: forgotten.append(8)) == [] and forgotten == [2]
    assert branch.leave(tmp_path, 2, lambda: forgotten.append(2)) == [] and forgotten == [2]


class Another:
    """Another process begins and ends the run while this one starts: before it asks for the lock."""

    def __init__(self, run: Path) -> None:
        self.run = run

    def __call__(self, tracer: Tracer) -> None:
        hold = run_lock.hold

        def late(run_dir: Path) -> str | None:
            (self.run / "checkpoints" / "step-00000009").mkdir(parents=True)
            (self.run / "config.yaml").write_text("of the other process")
            return hold(run_dir)

        run_lock.hold = late


def test_two_starts_at_once(folder: Path) -> None:
    run = folder / "runs" / "twice"
    job = Job(folder, fit_arguments(folder, "twice"), prepare=Another(run))
    assert job.join() == [2], job.output()
    assert f"another process began the run in {run} at this moment" in job.output()
    assert (run / "config.yaml").read_text() == "of the other process"
    assert os.listdir(run / "checkpoints") == ["step-00000009"]
