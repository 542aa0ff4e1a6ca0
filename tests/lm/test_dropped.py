"""Dropping samples from an order in use: what is left is the old order without them, whatever the stages."""

from __future__ import annotations

import numpy as np
import pytest

from lm.data.dropped import step_range, with_ranges
from lm.data.order import DataOrder, DataPlan, Stage

G, T = 64, 16
TOKENS = {"prose": 40_000, "code": 20_000}


def order_of(skipped=(), ramp=()) -> DataOrder:
    """Steps 0 to 9 in stage 0, 10 to 19 in stage 1 with windows half as long, then stage 2."""
    mix = {"prose": 0.5, "code": 0.5}
    stages = (Stage(0, T, mix), Stage(10 * G, T // 2, mix), Stage(20 * G, T, {"code": 1.0}))
    return DataOrder(DataPlan(3, G, stages, ramp), TOKENS, skipped)


def stage_samples(order: DataOrder, stage: int, steps: range) -> list[tuple[int, int]]:
    """(stage, k within the stage) of each sample of the steps."""
    k = np.concatenate([order.step_samples(step) for step in steps])
    return [(stage, int(value)) for value in k - order.stage_starts[stage]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(8, 12)], [(20, 24)]),
        ([(50, 60)], [(8, 12)]),  # an older drop in stage 1 moves along
        ([], [(8, 12), (50, 60), (130, 140)]),
        ([(45, 50)], [(36, 48)]),  # across the border of two stages, over an older drop
        ([(4, 8), (124, 128)], [(0, 44)]),  # all of a stage and more
    ],
)
def test_every_stage_loses_what_was_dropped_in_it_and_nothing_else(first, second) -> None:
    old = order_of(with_ranges(order_of(), first))
    new = order_of(with_ranges(old, second))
    gone = {k for start, stop in second for k in range(start, stop)}
    for stage, steps in enumerate((range(10), range(10, 20), range(20, 40))):
        far = range(steps.start, steps.stop + 12) if stage == 2 else steps
        kept = [pair for pair in stage_samples(old, stage, far) if pair[1] + old.stage_starts[stage] not in gone]
        got = stage_samples(new, stage, steps)
        shared = min(len(kept), len(got))
        assert got[:shared] == kept[:shared]
        assert (got[0] == kept[0]) if kept else stage == 0
        assert len(got) == len(stage_samples(old, stage, steps))  # a stage lasts its planned steps


def test_step_range_covers_the_steps_and_no_others() -> None:
    order = order_of(with_ranges(order_of(), [(8, 12)]))
    start, stop = step_range(order, 1, 3)
    assert (start, stop) == (4, 20)
    outside = np.concatenate([order.step_samples(step) for step in (0, 4, 5)])
    assert not np.any((outside >= start) & (outside < stop))
