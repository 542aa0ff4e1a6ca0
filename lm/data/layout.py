"""How a global batch is cut into micro-batches."""

from __future__ import annotations

import math

from lm.data.plan import DataPlan
from lm.errors import ConfigError


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0] if n > 0 else []


def micro_batches(plan: DataPlan, world_size: int, micro_batch_size: int | None) -> tuple[int, int]:
    """(micro-batch size of the first stage in windows, micro-batches a rank and step, at the first step).

    The number of micro-batches is the same in every stage: a stage with longer windows has fewer in each. Where the
    batch grows, a micro-batch keeps its size and their number grows: see `by_batch`.

    Args:
        micro_batch_size: windows of the first stage a rank takes at once; None: its whole share (with a batch ramp, the
            most that all batches divide by).

    Raises:
        ValueError: one line with the values that would work.
    """
    samples = plan.samples_per_step(0)
    if samples % world_size:
        raise ConfigError(
            f"a step has {samples} windows (global_batch_tokens {plan.ramp.batch(0)} / sequence_length"
            f" {plan.stages[0].sequence_length}), which {world_size} processes cannot share;"
            f" process counts that work: {_some(divisors(samples))}"
        )
    share = samples // world_size
    T = plan.stages[0].sequence_length
    most = math.gcd(*(batch // (T * world_size) for batch in plan.batches()))
    size = most if micro_batch_size is None else micro_batch_size
    if size < 1 or share % size:
        raise ConfigError(
            f"micro_batch_size {size} does not divide the {share} windows that each of {world_size} processes takes a"
            f" step; micro_batch_size values that work: {_some(divisors(share))};"
            f" with it, process counts: {_some(divisors(samples // size)) if size > 0 == samples % size else 'none'}"
        )
    for batch in plan.batches():
        unit = T * world_size * size
        if batch % unit:
            raise ConfigError(
                f"batch_ramp: {batch} tokens a step are not a multiple of {unit} (sequence_length {T} x {world_size}"
                f" processes x micro_batch_size {size}); the nearest that works is {max(1, round(batch / unit)) * unit}"
            )
    accumulate = by_batch(plan, world_size, size)
    for index, batch in plan.pairs():
        samples = batch // plan.stages[index].sequence_length
        if samples % (world_size * accumulate[batch]):
            raise ConfigError(
                f"stage {index} has {samples} windows of {plan.stages[index].sequence_length} tokens a step,"
                f" which {world_size} processes x {accumulate[batch]} micro-batches cannot share;"
                " raise micro_batch_size, use fewer processes or raise global_batch_tokens"
            )
    return size, share // size


def by_batch(plan: DataPlan, world_size: int, micro_batch_size: int) -> dict[int, int]:
    """Micro-batches a rank and step, by the global batch in tokens.

    Args:
        micro_batch_size: as `micro_batches` returned it.
    """
    unit = plan.stages[0].sequence_length * world_size * micro_batch_size
    return {batch: batch // unit for batch in plan.batches()}


def _some(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:12])
    return shown if len(values) <= 12 else f"{shown}, ..., {values[-1]}"
