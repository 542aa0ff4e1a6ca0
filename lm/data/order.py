"""Data order as a function: the k-th training sample follows from (seed, plan, k) alone. numpy only.

Three steps lead from k to a window of a source, each computed at any k in O(1):

1. the stage of the plan k lies in;
2. the block of the stage, in which every source has an exact number of samples, in keyed random order: this gives the
   source and how many of its samples came before (its draw number);
3. the epoch of that draw and, in a permutation keyed by (seed, source, sequence length, epoch), the window.

So a resume at any step costs nothing and no result depends on world size, micro-batch, accumulation or workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lm.data import blocks
from lm.data.blocks import Float64Array, Int64Array, block_counts
from lm.data.packing import PackedCounts
from lm.data.permute import key_of, permute, subkeys
from lm.data.plan import DataPlan, Stage
from lm.errors import ConfigError

CACHED_BLOCKS = 4


def merge_ranges(ranges: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Sorted disjoint [start, stop) ranges that cover the same numbers."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((int(a), int(b)) for a, b in ranges):
        if start < 0 or stop < start:
            raise ConfigError(f"a skipped range needs 0 <= start <= stop, got [{start}, {stop})")
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged


@dataclass(frozen=True)
class _Lane:
    """One stage laid out over k: samples [start, stop), including the skipped ones."""

    start: int
    jump_after: Int64Array  # [R + 1] sorted positions within the stage at which the r-th jump has happened
    jump: Int64Array  # [R + 1] samples jumped over by then
    counts: Int64Array  # [N] of each source in a block
    bounds: Int64Array  # [N] running sum of counts
    first_draw: Int64Array  # [N] draws of each source before the stage
    block_key: int

    @property
    def block_samples(self) -> int:
        """Samples a block."""
        return int(self.bounds[-1])


class DataOrder:
    """Which window each training sample is.

    Args:
        plan: stages and weights.
        source_tokens: tokens of each source's train split, in the order that source indices refer to.
        packed: of a plan that packs, the windows of each (source, sequence length) it draws from; None: a
            source's tokens are cut every T.
        skipped: [start, stop) ranges of k that the stream jumps over (batches dropped after a roll-back). A stage lasts
            its planned number of steps all the same: it takes as many further samples as were skipped in it.

    Raises:
        ValueError: a weight names an unknown source, or a source is shorter than one window.
    """

    def __init__(
        self,
        plan: DataPlan,
        source_tokens: Mapping[str, int],
        skipped: Iterable[Sequence[int]] = (),
        packed: Mapping[tuple[str, int], PackedCounts] | None = None,
    ) -> None:
        self.plan = plan
        self.packed = packed
        self.source_names = tuple(source_tokens)
        self._windows = [self._count_windows(stage, source_tokens) for stage in plan.stages]
        self._lay_out(skipped)

    def _lay_out(self, skipped: Iterable[Sequence[int]]) -> None:
        self.skipped = merge_ranges(skipped)
        self._lanes: list[_Lane] = []
        self._blocks: dict[tuple[int, int], tuple[Int64Array, Int64Array]] = {}
        start = 0
        drawn: dict[int, Int64Array] = {}
        for index in range(len(self.plan.stages)):
            start = self._add_lane(index, start, drawn)
        self._starts = np.array([lane.start for lane in self._lanes], dtype=np.int64)

    def with_skipped(self, skipped: Iterable[Sequence[int]]) -> DataOrder:
        """The order of the same plan and data that jumps over these ranges of k, and over no others."""
        other = copy.copy(self)
        other._lay_out(skipped)
        return other

    def _count_windows(self, stage: Stage, source_tokens: Mapping[str, int]) -> Int64Array:
        for name, weight in stage.weights.items():
            if name not in source_tokens:
                raise ConfigError(f"unknown source '{name}' in weights; prepared sources: {', '.join(source_tokens)}")
            if weight > 0 and source_tokens[name] == 0:
                raise ConfigError(f"'{name}' has a weight but no document of such a length; change it or drop it")
            if self.packed is None and weight > 0 and (source_tokens[name] - 1) // stage.sequence_length < 1:
                raise ConfigError(
                    f"sequence_length {stage.sequence_length} is longer than the {source_tokens[name]} tokens of source"
                    f" '{name}'; shorten it, set the source's weight to 0 or prepare more text"
                )
        if self.packed is None:
            counts = [max(1, (n - 1) // stage.sequence_length) for n in source_tokens.values()]
        else:
            found = [self.packed.get((name, stage.sequence_length)) for name in source_tokens]
            counts = [1 if each is None else max(1, each.windows) for each in found]
        return np.array(counts, dtype=np.int64)

    def _fill(self, stage: Stage) -> Float64Array:
        """Tokens a position of each source's windows: 1 without padding; float64 [N]."""
        found = [(self.packed or {}).get((name, stage.sequence_length)) for name in self.source_names]
        return np.array([1.0 if each is None else 1 - each.padding(stage.sequence_length) for each in found])

    def _counts_of_block(self, stage: Stage) -> Int64Array:
        """Samples of each source in a block."""
        weights = np.array([stage.weights.get(name, 0.0) for name in self.source_names])
        # Weights are shares of the tokens: a source with more padding gets more windows.
        counts = block_counts(weights / self._fill(stage))
        missed = [self.source_names[i] for i in np.flatnonzero((counts == 0) & (weights > 0))]
        if missed:
            raise ConfigError(
                f"the weight of '{missed[0]}' is below 1 in {blocks.MAX_BLOCK_SAMPLES} and cannot be drawn; raise it or"
                " set it to 0"
            )
        return counts

    def _add_lane(self, index: int, start: int, drawn: dict[int, Int64Array]) -> int:
        stage = self.plan.stages[index]
        counts = self._counts_of_block(stage)
        is_last = index + 1 == len(self.plan.stages)
        steps = 0 if is_last else self.plan.first_step(index + 1) - self.plan.first_step(index)
        stop = start + self._tokens(index, self.plan.first_step(index) + steps) // stage.sequence_length
        jump_after, jump = [np.iinfo(np.int64).min], [0]
        for a, b in self.skipped:
            a = max(a, start)
            if a < b and (is_last or a < stop):
                jump_after.append(a - start - jump[-1])
                jump.append(jump[-1] + b - a)
                stop += b - a
        first_draw = drawn.get(stage.sequence_length, np.zeros(len(counts), dtype=np.int64))
        self._lanes.append(
            _Lane(
                start=start,
                jump_after=np.array(jump_after, dtype=np.int64),
                jump=np.array(jump, dtype=np.int64),
                counts=counts,
                bounds=np.cumsum(counts),
                first_draw=first_draw,
                block_key=key_of("block", self.plan.seed, index),
            )
        )
        if is_last:
            return stop
        # A later stage of the same length goes on where this one stopped.
        blocks, rest = divmod(stop - start, int(counts.sum()))
        in_rest = np.bincount(self._block(index, blocks)[0][:rest], minlength=len(counts))
        drawn[stage.sequence_length] = first_draw + blocks * counts + in_rest
        return stop

    def _tokens(self, index: int, step: int) -> int:
        """Tokens of a stage before a step."""
        ramp = self.plan.ramp
        return ramp.tokens(step) - ramp.tokens(self.plan.first_step(index))

    def _block(self, index: int, block: int) -> tuple[Int64Array, Int64Array]:
        """Of each sample of a block: its source, and how many of that source come before it in the block."""
        if (index, block) not in self._blocks:
            lane = self._lanes[index]
            key = subkeys(lane.block_key, np.array([block], dtype=np.int64))
            slot = permute(np.arange(lane.block_samples, dtype=np.int64), lane.block_samples, key)
            source = np.searchsorted(lane.bounds, slot, side="right")
            rank = np.empty_like(source)
            rank[np.argsort(source, kind="stable")] = np.arange(len(source)) - np.repeat(
                lane.bounds - lane.counts, lane.counts
            )
            while len(self._blocks) >= CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[index, block] = source, rank
        return self._blocks[index, block]

    @property
    def stage_starts(self) -> list[int]:
        """First k of each stage."""
        return [lane.start for lane in self._lanes]

    def step_samples(self, step: int, n_steps: int = 1) -> Int64Array:
        """k of each sample of steps [step, step + n_steps), alike in stage and batch; int64 [n_steps * S]."""
        index = self.plan.stage_of_step(step)
        lane, samples = self._lanes[index], self.plan.samples_per_step(step)
        before = self._tokens(index, step) // self.plan.stages[index].sequence_length
        position = np.arange(n_steps * samples, dtype=np.int64) + before
        jumped = np.searchsorted(lane.jump_after, position, side="right") - 1
        return lane.start + position + lane.jump[jumped]

    def locate(self, k: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(source index, window index) of samples k; each int64 [len(k)]. The cost does not depend on k."""
        k = np.asarray(k, dtype=np.int64)
        stage_of_k = np.searchsorted(self._starts, k, side="right") - 1
        source = np.empty_like(k)
        window = np.empty_like(k)
        for index in np.unique(stage_of_k):
            mask = stage_of_k == index
            source[mask], window[mask] = self._locate_in_stage(int(index), k[mask])
        return source, window

    def _locate_in_stage(self, index: int, k: Int64Array) -> tuple[Int64Array, Int64Array]:
        source, draw = self.draws(index, k)
        n_windows = self._windows[index][source]
        epoch, visit = np.divmod(draw, n_windows)
        keys = self._epoch_keys(self.plan.stages[index].sequence_length, source, epoch)
        return source, permute(visit, n_windows, keys)

    def draws(self, index: int, k: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(source index, draw number) of samples k of a stage; each int64 [len(k)].

        Draws of a source are counted over all stages of one sequence length, those that are skipped included.
        """
        lane = self._lanes[index]
        block, position = np.divmod(k - lane.start, lane.block_samples)
        source, rank = np.empty_like(k), np.empty_like(k)
        for number in np.unique(block).tolist():
            mask = block == number
            sources, ranks = self._block(index, number)
            source[mask], rank[mask] = sources[position[mask]], ranks[position[mask]]
        return source, np.asarray(lane.first_draw[source] + block * lane.counts[source] + rank, dtype=np.int64)

    def places(self, index: int, source: Int64Array, draw: Int64Array) -> Int64Array:
        """k of draws in a stage, were it to last for ever: int64, without those before it and of no source of it."""
        lane = self._lanes[index]
        ahead = draw - lane.first_draw[source]
        mask = (lane.counts[source] > 0) & (ahead >= 0)
        source = source[mask]
        block, rank = np.divmod(ahead[mask], lane.counts[source])
        k: Int64Array = lane.start + block * lane.block_samples
        for number in np.unique(block).tolist():
            mask = block == number
            by_source = np.argsort(self._block(index, number)[0], kind="stable")
            k[mask] += by_source[(lane.bounds - lane.counts)[source[mask]] + rank[mask]]
        return k

    def _epoch_keys(self, sequence_length: int, source: Int64Array, epoch: Int64Array) -> NDArray[np.uint64]:
        keys = np.empty(len(source), dtype=np.uint64)
        for index in np.unique(source):
            mask = source == index
            key = key_of("epoch", self.plan.seed, self.source_names[index], sequence_length)
            keys[mask] = subkeys(key, epoch[mask])
        return keys

    def tokens_drawn(self, total_tokens: int) -> dict[str, float]:
        """Tokens of each source that the first `total_tokens` positions hold, from the plan alone.

        Where windows are padded, padding is left out at its mean over a source's windows.
        """
        drawn = sum(self._drawn_by_stage(total_tokens), np.zeros(len(self.source_names)))
        return dict(zip(self.source_names, drawn.tolist(), strict=True))

    def by_stage(self, total_tokens: int) -> list[dict[str, tuple[float, float]]]:
        """(tokens, epochs) that each stage draws of each source; zeros in one that the run does not reach.

        An epoch is every window once. Windows leave out what is left of a source after the last whole one.
        """
        found = []
        for stage, windows, drawn in zip(
            self.plan.stages, self._windows, self._drawn_by_stage(total_tokens), strict=True
        ):
            epochs = drawn / (windows * stage.sequence_length * self._fill(stage))
            pairs = zip(drawn.tolist(), epochs.tolist(), strict=True)
            found.append(dict(zip(self.source_names, pairs, strict=True)))
        return found

    def _drawn_by_stage(self, total_tokens: int) -> list[Float64Array]:
        starts = [self.plan.ramp.tokens(self.plan.first_step(i)) for i in range(len(self.plan.stages))]
        drawn = []
        for stage, lane, start, stop in zip(
            self.plan.stages, self._lanes, starts, [*starts[1:], total_tokens], strict=True
        ):
            positions = max(0, min(stop, total_tokens) - start) * lane.counts / lane.counts.sum()
            drawn.append(positions * self._fill(stage))
        return drawn
