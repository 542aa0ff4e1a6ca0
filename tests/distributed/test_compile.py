"""Compiled blocks train as plain ones do, under the strategies that wrap, shard or spread them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm.config import RuntimeConfig
from tests.distributed import context_jobs as jobs
from tests.distributed import harness
from tests.distributed.scenario import SINGLE, Layout

LAYOUTS = [
    Layout("ddp", 2),
    Layout("fsdp", 2),
    Layout("zero2", 2),
    Layout("zero3", 2),
    Layout("fsdp", 2, {"context_parallel": 2}, "cp2"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("recomputed", ["none", "selective"])
def test_compiled_blocks_equal_plain_ones_of_one_process(tmp_path: Path, layout: Layout, recomputed: str) -> None:
    data = jobs.write_data(tmp_path / "data")
    (reference,) = harness.run(jobs.recipe_run, 1, SINGLE, data, steps=3)
    runtime = RuntimeConfig(compile=True, activation_checkpointing=recomputed)
    for rows in harness.run(jobs.recipe_run, 2, layout, data, steps=3, runtime=runtime, timeout_seconds=600):
        jobs.assert_same(rows, reference)
