"""What a run reads, from its config and the data folder alone: the plan, its order, and tables of both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lm.data.changes import StageChange, stages_of
from lm.data.dropped import with_ranges
from lm.data.epochs import EpochRow, epoch_rows
from lm.data.fragmentation import FragmentationRow, fragmentation_rows
from lm.data.mix import Mixes, Settled
from lm.data.order import DataOrder
from lm.data.packing import packed_counts
from lm.data.plan import DataPlan, Stage
from lm.data.ramp import BatchRamp
from lm.data.resume import plan_fingerprint
from lm.data.shards import Manifest
from lm.data.slices import base_of, train_tokens

# Says what its owner changes in later stages, given the tokens that steps take.
Contribution = Callable[[BatchRamp], Sequence[StageChange]]


class PlannedStream(ABC):
    """The part of lm.datamodule.TokenDataModule that needs no trainer; settings and attributes are documented there."""

    manifest: Manifest
    plan: DataPlan
    order: DataOrder
    mixes: list[Settled]
    source_weights: dict[str, float]
    skipped: list[tuple[int, int]]
    sequence_length: int
    global_batch_tokens: int
    batch_ramp: tuple[tuple[int, int], ...]
    weights: dict[str, Any] | None
    seed: int
    packing: str
    later_stages: list[Stage]
    _contributions: dict[str, Contribution]
    _saved_mixes: list[Settled]

    _fragmented: tuple[DataPlan, list[FragmentationRow]] | None = None

    @abstractmethod
    def _max_steps(self) -> int:
        """Length of the run; below 1: not known."""

    def _make_plan(self) -> DataPlan:
        first = Stage(0, self.sequence_length, self.manifest.tokens("train") if self.weights is None else self.weights)
        ramp = BatchRamp(self.batch_ramp or ((0, self.global_batch_tokens),))
        max_steps = self._max_steps()
        mixes = Mixes(self.manifest, ramp, ramp.tokens(max_steps) if max_steps > 0 else None, self._saved_mixes)
        given = [StageChange(stage.from_tokens, stage.sequence_length, stage.weights) for stage in self.later_stages]
        changes = {owner: contribution(ramp) for owner, contribution in self._contributions.items()}
        stages = stages_of(first, ramp, {"data.stages": given, **changes}, mixes.settle)
        self.mixes = mixes.settled
        self.source_weights = source_shares(stages[0].weights, self.manifest.source_names)
        return DataPlan(self.seed, self.global_batch_tokens, stages, self.batch_ramp, self.packing)

    def _make_order(self) -> DataOrder:
        tokens = train_tokens(self.manifest, self.plan.source_names())
        return DataOrder(self.plan, tokens, self.skipped, packed_counts(self.manifest, self.plan))

    def tokens_trained(self, step: int) -> int:
        """Tokens before a 0-based step; padding, counted at its mean over a source's windows, is not among them."""
        positions = self.plan.ramp.tokens(step)
        return positions if self.packing == "cut" else round(sum(self.order.tokens_drawn(positions).values()))

    def epoch_table(self, total_tokens: int | None = None) -> list[EpochRow]:
        """Per source: documents, unique tokens, bytes per token, weight, tokens drawn, epochs; from the plan alone.

        Args:
            total_tokens: length of the run; None: the trainer's max_steps.
        """
        if total_tokens is None:
            total_tokens = self.plan.ramp.tokens(max(self._max_steps(), 0))
        return epoch_rows(self.manifest, self.order, total_tokens)

    def fragmentation(self) -> list[FragmentationRow]:
        """Per source and sequence length: documents that windows cut, and padding; one pass a plan over all ends."""
        if self._fragmented is None or self._fragmented[0] is not self.plan:
            self._fragmented = self.plan, fragmentation_rows(self.manifest, self.plan, self.order.packed)
        return self._fragmented[1]

    def fingerprint(self) -> dict[str, Any]:
        """Shards, tokenizer and plan, as plain values."""
        return {**self.manifest.fingerprint(), "plan": plan_fingerprint(self.plan)}

    def skip_samples(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Drop [start, stop) ranges of k, as they are numbered now; iterate the loader anew afterwards."""
        self.set_skipped(with_ranges(self.order, ranges))

    def set_skipped(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Let these be all ranges that are dropped; iterate the loader anew afterwards."""
        self.skipped = list(ranges)
        self.order = self._make_order()
        self.skipped = list(self.order.skipped)


def source_shares(mix: Mapping[str, float], sources: Sequence[str]) -> dict[str, float]:
    """Weight of each source, its slices taken together."""
    weights: dict[str, float] = {}
    for name, weight in mix.items():
        base = base_of(name, sources)
        weights[base] = weights.get(base, 0.0) + weight
    return weights
