"""Dropping more samples from a data order that is in use. numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lm.data.blocks import Int64Array
from lm.data.order import DataOrder, merge_ranges

Ranges = list[tuple[int, int]]


def with_ranges(order: DataOrder, ranges: Iterable[Sequence[int]]) -> Ranges:
    """All skipped ranges of an order in which `ranges` are dropped too: what was dropped is not read anywhere else.

    A stage lasts its planned steps whatever is dropped from it, so it takes further samples. The numbers k of later
    stages move up, and one with the same sequence length also goes on later in each source; in the stage before, some
    of what was dropped from it comes within reach. So each stage skips the draws that are dropped, wherever they are.

    Args:
        ranges: [start, stop) of k as `order` numbers its samples.
    """
    dropped = _dropped_draws(order, merge_ranges([*order.skipped, *ranges]))
    skipped: Ranges = []
    for index, stage in enumerate(order.plan.stages):
        laid = order.with_skipped(skipped)  # all stages before this one are as they will be
        places = [laid.places(index, *draws) for length, draws in dropped if length == stage.sequence_length]
        k = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *places]))
        if index + 1 < len(laid.stage_starts):
            # The end moves up by one with each that is skipped before it.
            k = k[: np.searchsorted(k - np.arange(len(k)), laid.stage_starts[index + 1])]
        skipped += _runs(k)
    return merge_ranges(skipped)


def step_range(order: DataOrder, first: int, last: int) -> tuple[int, int]:
    """[start, stop) of k that covers the samples of the steps from `first` to `last`, both 0-based and included."""
    return int(order.step_samples(first)[0]), int(order.step_samples(last)[-1]) + 1


def _dropped_draws(order: DataOrder, ranges: Ranges) -> list[tuple[int, tuple[Int64Array, Int64Array]]]:
    """(sequence length, (source, draw number) of each sample of the ranges) by stage."""
    starts, found = order.stage_starts, []
    for index, (begin, end) in enumerate(zip(starts, [*starts[1:], None], strict=True)):
        k = [np.arange(a, b) for a, b in _within(ranges, begin, end)]
        if k:
            found.append((order.plan.stages[index].sequence_length, order.draws(index, np.concatenate(k))))
    return found


def _within(ranges: Iterable[tuple[int, int]], begin: int, end: int | None) -> Ranges:
    cut = [(max(a, begin), b if end is None else min(b, end)) for a, b in ranges]
    return [(a, b) for a, b in cut if a < b]


def _runs(k: Int64Array) -> Ranges:
    """[start, stop) of each run of consecutive numbers; k sorted, without repeats."""
    if len(k) == 0:
        return []
    parts = np.split(k, np.flatnonzero(np.diff(k) > 1) + 1)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]
