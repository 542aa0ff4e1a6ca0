"""What a run trains on: stages, each with one sequence length and one mix, over a number of tokens. Plain values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lm.data.ramp import BatchRamp
from lm.errors import ConfigError

# cut: documents one after the other, cut every T tokens. best_fit: see lm.data.best_fit.
PACKINGS = ("cut", "best_fit")


@dataclass(frozen=True)
class Stage:
    """Part of a plan with one sequence length and one mix.

    Attributes:
        from_tokens: training tokens before the stage starts; rounded up to a whole step.
        sequence_length: T, tokens a window.
        weights: share of each source in the samples, need not sum to 1; sources left out or at 0 are not drawn. A name
            may be a slice of a source by the length of its documents: `web[>=8192]`, see lm.data.slices. In a config
            also a rule, see lm.data.mix; a plan has numbers.
    """

    from_tokens: int
    sequence_length: int
    weights: Mapping[str, Any]


@dataclass(frozen=True)
class DataPlan:
    """What a run trains on. A step takes `global_batch_tokens` tokens in every stage, unless there is a ramp.

    Attributes:
        seed: of the order.
        global_batch_tokens: G, tokens an optimizer step; a multiple of every stage's sequence length.
        stages: the first starts at 0, starts increase.
        batch_ramp: (from_tokens, batch_tokens) pairs that end at G, see lm.data.ramp; empty for G throughout.
        packing: one of PACKINGS. With best_fit a plan's tokens are positions, padding included.
    """

    seed: int
    global_batch_tokens: int
    stages: tuple[Stage, ...]
    batch_ramp: tuple[tuple[int, int], ...] = ()
    packing: str = "cut"

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            raise ConfigError(f"packing must be one of {', '.join(PACKINGS)}, got {self.packing}")
        if self.ramp.points[-1][1] != self.global_batch_tokens:
            raise ConfigError(
                f"batch_ramp ends at {self.ramp.points[-1][1]} tokens a step, global_batch_tokens is"
                f" {self.global_batch_tokens}; make them equal"
            )
        if not self.stages or self.stages[0].from_tokens != 0:
            raise ConfigError("a data plan needs a first stage with from_tokens 0")
        starts = [self.first_step(i) for i in range(len(self.stages))]
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
            tokens = [stage.from_tokens for stage in self.stages]
            raise ConfigError(
                f"stages must start at increasing from_tokens, at least one step of {self.global_batch_tokens} tokens"
                f" apart, got {tokens}"
            )
        for index, batch in self.pairs():
            _check_multiple(batch, self.stages[index].sequence_length)
        for stage in self.stages:
            if any(not math.isfinite(w) or w < 0 for w in stage.weights.values()) or not any(stage.weights.values()):
                raise ConfigError(f"weights must be 0 or more with one above 0, got {dict(stage.weights)}")
            if not math.isfinite(sum(stage.weights.values())):
                raise ConfigError(f"weights are too large to add up, got {dict(stage.weights)}; divide all by the same")

    def first_step(self, stage: int) -> int:
        """0-based step at which a stage starts."""
        return self.ramp.first_step_at(self.stages[stage].from_tokens)

    def stage_of_step(self, step: int) -> int:
        """Index of the stage that a 0-based step belongs to."""
        return sum(self.first_step(i) <= step for i in range(1, len(self.stages)))

    @cached_property
    def ramp(self) -> BatchRamp:
        """Tokens a step takes, and tokens before it."""
        return BatchRamp(self.batch_ramp or ((0, self.global_batch_tokens),))

    def batches(self) -> list[int]:
        """Sizes in tokens that a step has in the course of the run, without repeats."""
        return list(dict.fromkeys(batch for _, batch in self.ramp.points))

    def pairs(self) -> list[tuple[int, int]]:
        """(stage, batch in tokens) of the steps of the run, each pair once."""
        steps = {self.first_step(i) for i in range(len(self.stages))} | {start for start, _, _ in self.ramp.starts}
        return list(dict.fromkeys((self.stage_of_step(step), self.ramp.batch(step)) for step in sorted(steps)))

    def samples_per_step(self, step: int) -> int:
        """S = G / T of a 0-based step."""
        return self.ramp.batch(step) // self.stages[self.stage_of_step(step)].sequence_length

    def tokens_by_length(self, step: int) -> list[tuple[int, int]]:
        """(sequence length, tokens) of each stage as far as it lies before a step."""
        starts = [min(self.first_step(i), step) for i in range(len(self.stages))]
        return [
            (stage.sequence_length, self.ramp.tokens(stop) - self.ramp.tokens(start))
            for stage, start, stop in zip(self.stages, starts, [*starts[1:], step], strict=True)
        ]

    def source_names(self) -> set[str]:
        """Sources and slices that some stage draws from."""
        return {name for stage in self.stages for name, weight in stage.weights.items() if weight > 0}

    def steps_alike(self, step: int) -> int | None:
        """Steps from this one on that have its stage and batch; None: all that follow."""
        later = [self.first_step(i) for i in range(1, len(self.stages))] + [start for start, _, _ in self.ramp.starts]
        return min((first - step for first in later if first > step), default=None)


def _check_multiple(batch: int, sequence_length: int) -> None:
    if sequence_length < 1:
        raise ConfigError(f"sequence_length must be at least 1, got {sequence_length}")
    if batch % sequence_length:
        near = _nearest_multiple(batch, sequence_length)
        raise ConfigError(
            f"global_batch_tokens {batch} is not a multiple of sequence_length {sequence_length};"
            f" the nearest that works is {near}"
        )


def _nearest_multiple(value: int, unit: int) -> int:
    return max(unit, round(value / unit) * unit)
