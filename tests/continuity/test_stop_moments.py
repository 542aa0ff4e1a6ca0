"""A signal at the moments that are hardest: before the first step, in it, in a validation, in a save."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from plugins.strategies import checkpoint
from tests.continuity.launch import Job, Tracer, fit_arguments, histories
from tests.continuity.test_stop import DDP, status

SHORT = ["--tokens", str(256 * 8)]


class SignalsItself:
    """SIGTERM to its own process, of rank `rank`, where the module's method `place` (or the write of a save) begins."""

    def __init__(self, place: str, rank: int) -> None:
        self.place, self.rank = place, rank

    def __call__(self, tracer: Tracer) -> None:
        from lm.module import LlamaModule
        from plugins.strategies import checkpoint_io

        if tracer.rank != self.rank:
            return
        owner: Any = checkpoint_io if self.place == "write" else LlamaModule
        method, sent = getattr(owner, self.place), False

        def signalled(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            if not sent:
                sent = True
                os.kill(os.getpid(), signal.SIGTERM)
            return method(*args, **kwargs)

        setattr(owner, self.place, signalled)


@pytest.mark.parametrize(
    ("place", "rank", "world_size", "stops_at"),
    [
        ("on_fit_start", 0, 1, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("setup", 0, 1, None),
                ("on_train_start", 0, 1, 1),
                ("training_step", 0, 1, 1),
                ("on_validation_epoch_start", 0, 1, 5),
                ("write", 0, 1, 3),
                ("write", 1, 2, 3),
                ("training_step", 1, 2, 1),
                ("setup", 1, 2, None),
                ("on_fit_start", 1, 2, None),
            )
        ),
    ],
)
def test_a_signal_at_a_bad_moment(folder: Path, place: str, rank: int, world_size: int, stops_at: int | None) -> None:
    name = f"moment-{place}-{world_size}"
    arguments = fit_arguments(folder, name, *SHORT, *(DDP if world_size == 2 else []))
    job = Job(folder, arguments, world_size, SignalsItself(place, rank))
    codes = job.join()
    checkpoints = folder / "runs" / name / "checkpoints"
    if stops_at is None:
        assert codes[rank] == -signal.SIGTERM and checkpoint.candidates(checkpoints) == []
    else:
        assert codes == [143] * world_size
        assert status(folder, name) == ("KILLED", "SIGTERM")
        assert checkpoint.candidates(checkpoints)[0].name == f"step-{stops_at:08d}"
    job = Job(folder, arguments, world_size)
    assert job.join() == [0] * world_size, job.output()
    assert status(folder, name)[0] == "FINISHED"
    found = histories(folder, name)
    assert sorted(found["loss"]) == list(range(1, 9))
    assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]


def workers_of(pid: int) -> list[int]:
    """Those below a process that started none; in a test the trainer's workers are forked by a server in between."""
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [below for child in own for below in workers_of(child) or [child]]


def test_a_signal_to_loader_workers_too(folder: Path) -> None:
    """A scheduler signals all processes of a job: the workers must go on until the step under way has its batches."""
    whole = ("--tokens", str(256 * 100_000), "--data.num_workers", "2", "--data.micro_batch_size", "1")
    job = Job(folder, fit_arguments(folder, "workers", *whole))
    assert job.wait_for(lambda what, step: what == "step" and step == 5)
    trainer = job.processes[0].pid
    workers = workers_of(trainer)  # type: ignore[arg-type]
    assert len(workers) >= 2
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    assert job.wait_for(lambda what, step: what == "step" and step == 8), job.output()
    os.kill(trainer, signal.SIGTERM)  # type: ignore[arg-type]
    assert job.join() == [143], job.output()
    assert "Traceback" not in job.output()
