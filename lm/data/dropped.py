"""Dropping more samples from a data order that is in use. numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lm.data.order import DataOrder, merge_ranges

Ranges = list[tuple[int, int]]


def with_ranges(order: DataOrder, ranges: Iterable[Sequence[int]]) -> Ranges:
    """All skipped ranges of an order in which `ranges` are dropped too.

    A stage lasts its planned steps whatever is dropped from it, so it takes as many further numbers k, and those of
    all later stages move up: what is dropped in them moves along.

    Args:
        ranges: [start, stop) of k as `order` numbers its samples.
    """
    starts = order.stage_starts
    added, result, shift = merge_ranges(ranges), [], 0
    for begin, end in zip(starts, [*starts[1:], None], strict=True):
        before = _within(order.skipped, begin, end)
        after = merge_ranges([*before, *_within(added, begin, end)])
        result += [(a + shift, b + shift) for a, b in after]
        shift += _length(after) - _length(before)
    return merge_ranges(result)


def step_range(order: DataOrder, first: int, last: int) -> tuple[int, int]:
    """[start, stop) of k that covers the samples of the steps from `first` to `last`, both 0-based and included."""
    return int(order.step_samples(first)[0]), int(order.step_samples(last)[-1]) + 1


def _within(ranges: Iterable[tuple[int, int]], begin: int, end: int | None) -> Ranges:
    cut = [(max(a, begin), b if end is None else min(b, end)) for a, b in ranges]
    return [(a, b) for a, b in cut if a < b]


def _length(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)
