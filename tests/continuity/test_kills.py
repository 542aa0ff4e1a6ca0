"""SIGKILL at any moment costs nothing but time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.continuity.kill_harness import KINDS, assert_same_end, run_killed
from tests.continuity.launch import write_experiment


@pytest.mark.parametrize(("world_size", "kills"), [(1, 5), (2, 3)])
def test_a_killed_run_ends_as_the_whole_one(world_size: int, kills: int, folder: Path) -> None:
    hit = run_killed(folder, world_size, kills, ["--trainer.strategy", "single" if world_size == 1 else "ddp"])
    assert sum(hit.values()) == kills
    assert_same_end(folder, world_size)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2])
def test_thirty_kills(world_size: int, tmp_path: Path) -> None:
    write_experiment(tmp_path, steps=120, every=3, validate_every=4)
    hit = run_killed(tmp_path, world_size, 30, ["--trainer.strategy", "single" if world_size == 1 else "ddp"], seed=1)
    print(dict(hit))
    assert all(hit[kind] > 0 for kind in KINDS), hit
    assert_same_end(tmp_path, world_size)
