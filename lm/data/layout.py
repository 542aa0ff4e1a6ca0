"""How a global batch is cut into micro-batches."""

from __future__ import annotations

from lm.data.order import DataPlan
from lm.errors import ConfigError


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0] if n > 0 else []


def micro_batches(plan: DataPlan, world_size: int, micro_batch_size: int | None) -> tuple[int, int]:
    """(micro-batch size of the first stage in windows, micro-batches a rank and step).

    The number of micro-batches is the same in every stage: a stage with longer windows has fewer in each.

    Args:
        micro_batch_size: windows of the first stage a rank takes at once; None: its whole share.

    Raises:
        ValueError: one line with the values that would work.
    """
    samples = plan.samples_per_step(0)
    if samples % world_size:
        raise ConfigError(
            f"a step has {samples} windows (global_batch_tokens {plan.global_batch_tokens} / sequence_length"
            f" {plan.stages[0].sequence_length}), which {world_size} processes cannot share;"
            f" process counts that work: {_some(divisors(samples))}"
        )
    share = samples // world_size
    size = share if micro_batch_size is None else micro_batch_size
    if size < 1 or share % size:
        raise ConfigError(
            f"micro_batch_size {size} does not divide the {share} windows that each of {world_size} processes takes a"
            f" step; micro_batch_size values that work: {_some(divisors(share))};"
            f" with it, process counts: {_some(divisors(samples // size)) if size > 0 == samples % size else 'none'}"
        )
    accumulate = share // size
    for index, stage in enumerate(plan.stages):
        if plan.samples_per_step(index) % (world_size * accumulate):
            raise ConfigError(
                f"stage {index} has {plan.samples_per_step(index)} windows of {stage.sequence_length} tokens a step,"
                f" which {world_size} processes x {accumulate} micro-batches cannot share;"
                " raise micro_batch_size, use fewer processes or raise global_batch_tokens"
            )
    return size, accumulate


def _some(values: list[int]) -> str:
    shown = ", ".join(str(value) for value in values[:12])
    return shown if len(values) <= 12 else f"{shown}, ..., {values[-1]}"
