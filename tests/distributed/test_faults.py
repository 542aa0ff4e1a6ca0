"""What goes wrong on one rank goes wrong on all, with one line, and leaves the disk as it was."""

from __future__ import annotations

import os
import time

import pytest

from plugins.strategies import checkpoint
from tests.distributed import harness, jobs
from tests.distributed.scenario import SINGLE, Layout


@pytest.mark.parametrize("layout", [SINGLE, Layout("fsdp", 2), Layout("zero2", 2)], ids=lambda layout: layout.name)
def test_a_failing_rank_fails_the_save_everywhere_and_leaves_nothing(layout: Layout, tmp_path) -> None:
    errors = harness.run(jobs.failing_save, layout.world_size, layout, tmp_path)
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"cannot save {tmp_path / 'step-00000001'}: ")
    assert "No space left on device" in errors[0]
    assert "\n" not in errors[0]
    assert os.listdir(tmp_path) == []


def test_a_damaged_checkpoint_is_refused_on_all_ranks(runs, tmp_path) -> None:
    source = runs.checkpoint(SINGLE)
    names = checkpoint.file_names(source)
    assert "state.pt" in names
    for name in names:
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / checkpoint.MANIFEST).write_bytes((source / checkpoint.MANIFEST).read_bytes())
    shard = next(tmp_path / name for name in names if name.endswith(".distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    layout = Layout("ddp", 2)
    errors = harness.run(jobs.failing_load, 2, layout, tmp_path)
    assert len(set(errors)) == 1
    assert f"{tmp_path} is damaged: {shard.name} differs from its sha256" in errors[0]


def _fail_or_wait(failing: bool) -> None:
    import torch.distributed as dist

    if failing and dist.is_available() and os.environ["RANK"] == "1":
        raise ZeroDivisionError("on purpose")
    time.sleep(60)


def test_harness_reports_the_rank_that_failed_and_the_one_that_waited() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: still running.*rank 1:.*ZeroDivisionError: on purpose"):
        harness.run(_fail_or_wait, 2, True)
    assert time.monotonic() - start < 60


def test_harness_kills_what_hangs() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 0: still running.*_fail_or_wait"):
        harness.run(_fail_or_wait, 1, False, timeout_seconds=6)
