"""Dropping samples from an order in use: what is left is the old order without them, whatever the stages."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lm.data.dropped import step_range, with_ranges
from lm.data.order import DataOrder, DataPlan, Stage

G, T = 64, 16
TOKENS = {"prose": 40_000, "code": 20_000}


def order_of(skipped=(), ramp=(), half=2) -> DataOrder:
    """Steps 0 to 9 in stage 0, 10 to 19 in stage 1 with windows half (or 1 / `half`) as long, then stage 2."""
    mix = {"prose": 0.5, "code": 0.5}
    stages = (Stage(0, T, mix), Stage(10 * G, T // half, mix), Stage(20 * G, T, {"code": 1.0}))
    return DataOrder(DataPlan(3, G, stages, ramp), TOKENS, skipped)


def reading(order: DataOrder, k: NDArray[np.int64]) -> dict[tuple[int, str], list[int]]:
    """Windows that samples read, by sequence length and source, in the order of k; none comes twice in these tests."""
    windows: dict[tuple[int, str], list[int]] = {}
    for index, stage in enumerate(order.plan.stages):
        own = k[np.searchsorted(order.stage_starts, k, side="right") - 1 == index]
        for source, window in zip(*order.locate(own), strict=True):
            windows.setdefault((stage.sequence_length, order.source_names[source]), []).append(int(window))
    return windows


def steps(order: DataOrder, n_steps: int) -> NDArray[np.int64]:
    return np.concatenate([order.step_samples(step) for step in range(n_steps)])


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
@pytest.mark.parametrize("half", [2, 1], ids=["another length between", "one length"])
def test_what_was_dropped_is_read_nowhere_and_nothing_else_is_missing(first, second, half: int) -> None:
    """Each source, at each length, gives its windows in their old order, without those that were dropped."""
    old = order_of(with_ranges(order_of(half=half), first), half=half)
    new = order_of(with_ranges(old, second), half=half)
    gone = reading(old, np.concatenate([np.arange(start, stop) for start, stop in second]))
    before, after = reading(old, steps(old, 90)), reading(new, steps(new, 60))
    compared = 0
    for stream, windows in after.items():
        out = set(gone.get(stream, []))
        kept = [window for window in before[stream] if window not in out]
        shared = min(len(kept), len(windows))  # a stage that lost samples goes further in its sources than before
        assert windows[:shared] == kept[:shared]
        assert out.isdisjoint(windows)
        compared += shared
    assert compared >= 200
    assert [len(new.step_samples(step)) for step in range(40)] == [len(old.step_samples(step)) for step in range(40)]


def test_step_range_covers_the_steps_and_no_others() -> None:
    order = order_of(with_ranges(order_of(), [(8, 12)]))
    start, stop = step_range(order, 1, 3)
    assert (start, stop) == (4, 20)
    outside = np.concatenate([order.step_samples(step) for step in (0, 4, 5)])
    assert not np.any((outside >= start) & (outside < stop))
