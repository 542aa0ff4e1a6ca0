"""Kills a training run again and again, starts it anew with the same command, and holds the end against a whole run."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from plugins.strategies import checkpoint
from tests.continuity.launch import Job, Prepare, fit_arguments, histories

KINDS = ("save", "validation", "step")


def run_whole(folder: Path, world_size: int, more: list[str], prepare: Prepare | None = None) -> dict[str, float]:
    """One run without faults, under the name whole-<world_size>. Returns the median seconds of each kind of moment."""
    job = Job(folder, fit_arguments(folder, f"whole-{world_size}", *more), world_size, prepare)
    spans: dict[str, list[float]] = {kind: [] for kind in KINDS}
    began, what = time.monotonic(), ""

    def measure(kind: str, step: int) -> bool:
        nonlocal began, what
        now = time.monotonic()
        spans.get(what, []).append(now - began)
        began, what = now, kind
        return False

    job.wait_for(measure)
    assert job.join() == [0] * world_size, job.output()
    return {kind: sorted(times)[len(times) // 2] for kind, times in spans.items()}


def run_killed(
    folder: Path, world_size: int, kills: int, more: list[str], seed: int = 0, prepare: Prepare | None = None
) -> Counter[str]:
    """The same run, killed `kills` times: in turn in a save, a validation and a step, at a random moment of it.

    Returns:
        how often it was killed in the midst of what.
    """
    spans = run_whole(folder, world_size, more, prepare)
    chooser, hit = random.Random(seed), Counter[str]()
    arguments = fit_arguments(folder, f"killed-{world_size}", *more)
    for number in range(kills):
        job, kind, later = Job(folder, arguments, world_size, prepare), KINDS[number % 3], chooser.randint(0, 1)

        def at_the_moment(what: str, step: int, kind: str = kind) -> bool:
            nonlocal later
            later -= what == kind
            return later < 0

        assert job.wait_for(at_the_moment), f"the run was over after {number} kills:\n{job.output()}"
        time.sleep(chooser.uniform(0, spans[kind]))
        what, _ = job.kill()
        hit[what] += 1
    job = Job(folder, arguments, world_size, prepare)
    assert job.join() == [0] * world_size, job.output()
    return hit


def assert_same_end(folder: Path, world_size: int) -> None:
    """Final weights and optimizer state bit for bit, every metric of every step, no folder left behind."""
    whole, killed = (folder / "runs" / f"{name}-{world_size}" for name in ("whole", "killed"))
    newest = [checkpoint.candidates(run / "checkpoints")[0] for run in (whole, killed)]
    assert newest[0].name == newest[1].name
    files = [checkpoint.read_manifest(path)["files"] for path in newest]
    shards = [name for name in files[0] if name.endswith(".distcp")]
    assert len(shards) >= 1
    for name in shards:
        assert files[0][name]["sha256"] == files[1][name]["sha256"], name
    assert histories(folder, killed.name) == histories(folder, whole.name)
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == sorted(
        path.name for path in (whole / "checkpoints").iterdir()
    )
