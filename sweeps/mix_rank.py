"""Candidate mixes by bits per byte of each source: differences to the first candidate, paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lm.errors import ConfigError
from recipes.paired import Difference, paired

FIRST = "first"


@dataclass(frozen=True)
class MixRun:
    """A finished run: bits per byte of each source on its validation split."""

    mix: str
    seed: int
    bpb: Mapping[str, float]


@dataclass(frozen=True)
class Ranked:
    """One candidate.

    Attributes:
        score: mean of bits per byte over sources by the ranking's weights, and over seeds.
        bpb: mean over seeds, by source.
        seeds: number of finished runs.
        difference: of the score to the first candidate; None for the first itself.
        by_source: the same of each source's bits per byte.
    """

    mix: str
    score: float
    bpb: Mapping[str, float]
    seeds: int
    difference: Difference | None
    by_source: Mapping[str, Difference]

    @property
    def word(self) -> str:
        """How it compares with the first candidate."""
        return FIRST if self.difference is None else self.difference.word


@dataclass(frozen=True)
class Ranking:
    """All candidates, the lowest score first.

    Attributes:
        first: name of the candidate that others are held against.
        sources: in the order of the data folder.
        weights: of each source in the score, summing to 1.
        rows: candidates with at least one finished run.
        unfinished: candidates without one.
    """

    first: str
    sources: tuple[str, ...]
    weights: Mapping[str, float]
    rows: tuple[Ranked, ...]
    unfinished: tuple[str, ...]


def rank(
    runs: Sequence[MixRun], mixes: Sequence[str], sources: Sequence[str], score: Mapping[str, float] | None = None
) -> Ranking:
    """Rank candidates.

    Args:
        runs: finished ones, at most one a mix and seed.
        mixes: all candidates; the first is what others are held against.
        score: weight of each source; empty: all alike. Sources of weight 0 are reported, not counted.

    Raises:
        ConfigError: no run is finished.
    """
    if not runs:
        raise ConfigError("no run of the sweep has finished: there is nothing to rank")
    raw = {name: (score or {}).get(name, 0.0) if score else 1.0 for name in sources}
    weights = {name: weight / sum(raw.values()) for name, weight in raw.items()}

    def mean_bpb(run: MixRun) -> float:
        return sum(weight * run.bpb[name] for name, weight in weights.items())

    by_mix = {mix: {run.seed: run for run in runs if run.mix == mix} for mix in mixes}
    first = by_mix[mixes[0]]
    rows = []
    for mix, mine in by_mix.items():
        if not mine:
            continue
        common = sorted(mine.keys() & first.keys())
        pairs = [(seed, mine[seed], first[seed]) for seed in common]
        is_first = mix == mixes[0]
        rows.append(
            Ranked(
                mix=mix,
                score=float(np.mean([mean_bpb(run) for run in mine.values()])),
                bpb={name: float(np.mean([run.bpb[name] for run in mine.values()])) for name in sources},
                seeds=len(mine),
                difference=None if is_first else paired([(s, mean_bpb(a) - mean_bpb(b)) for s, a, b in pairs]),
                by_source={}
                if is_first
                else {name: paired([(s, a.bpb[name] - b.bpb[name]) for s, a, b in pairs]) for name in sources},
            )
        )
    rows.sort(key=lambda row: row.score)
    return Ranking(mixes[0], tuple(sources), weights, tuple(rows), tuple(mix for mix in mixes if not by_mix[mix]))
