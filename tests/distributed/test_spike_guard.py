"""The guard decides, skips and goes back alike under every strategy, with AdamW and with Muon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import guard_jobs, harness
from tests.distributed.guard_jobs import NAN_GRADIENT, NAN_LOSS, POISON, SCALED, STEPS
from tests.distributed.scenario import SINGLE, Layout
from tests.plugins.guard_runs import SAMPLES, make_folder

HSDP = Layout("hsdp", 4, {"replicate": 2, "shard": 2})
CASES = [
    (Layout("ddp", 2), "muon"),
    (HSDP, "adamw"),
    (Layout("zero2", 2), "muon"),
    (Layout("zero3", 2), "muon"),
]
SLOW_CASES = [
    (Layout("ddp", 2), "adamw"),
    (Layout("fsdp", 2), "adamw"),
    (Layout("fsdp", 2), "muon"),
    (HSDP, "muon"),
    (Layout("zero1", 2), "adamw"),
    (Layout("zero1", 2), "muon"),
    (Layout("zero2", 2), "adamw"),
    (Layout("zero3", 2), "adamw"),
]


class Runs:
    def __init__(self, folder: Path):
        self.folder = folder
        self.data = make_folder(folder / "data")
        self._ranks: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def ranks(self, layout: Layout, optimizer: str) -> list[dict[str, Any]]:
        key = (layout.name, optimizer)
        if key not in self._ranks:
            run_dir = self.folder / "-".join(key)
            self._ranks[key] = harness.run(guard_jobs.train, layout.world_size, layout, self.data, run_dir, optimizer)
        return self._ranks[key]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("guarded"))


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_spikes_are_skipped_and_rolled_back_alike(guarded: Runs, layout: Layout, optimizer: str) -> None:
    ranks = guarded.ranks(layout, optimizer)
    reference = guarded.ranks(SINGLE, optimizer)[0]
    result = ranks[0]
    assert result["accumulate"] == 2
    # Three strikes within ten steps: back to the checkpoint of step 10; the samples around them do not come again.
    assert result["visited"] == [*range(1, POISON + 2), *range(11, STEPS + 1)]
    assert result["unchanged"] == [NAN_LOSS, SCALED, NAN_GRADIENT, POISON]
    assert result["partly"] == []
    (back,) = result["guard"]["roll_backs"]
    assert (back["first_strike"], back["last_strike"], back["to_step"]) == (SCALED, POISON, 10)
    assert result["skipped"] == [(11 * SAMPLES, 22 * SAMPLES)]
    assert result["guard"]["skipped_steps"] == 1  # on this branch
    assert result["losses"] == pytest.approx(reference["losses"], rel=2e-5, nan_ok=True)
    for rank in ranks[1:]:
        assert rank["guard"] == result["guard"]  # statistics too, bit for bit
        assert (rank["visited"], rank["skipped"]) == (result["visited"], result["skipped"])
        assert rank["unchanged"] == result["unchanged"]
