"""A mix sweep's settings and its cells: one small model, the same tokens, one candidate mix (and seed) a cell."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.data.mix import rule_of, settled_weights, shares_of
from lm.data.slices import base_of
from lm.errors import ConfigError
from lm.optim.schedule import wsd_decay_start
from sweeps.config import SweepConfig, parse_config
from sweeps.grid import Cell, Corpus, cell_id, cell_of_tokens
from sweeps.parsing import check_names, load, real, whole
from sweeps.shapes import model_config
from sweeps.trunks import schedule_of

_OWNED = {  # settings of an IsoFLOP sweep -> what stands in their place here
    "budgets": "width and tokens", "sizes": "width", "batch": "sequences", "lr_horizon": "optim.lr", "mode": "anneal",
}  # fmt: skip


@dataclass(frozen=True)
class MixSweep:
    """A sweep over mixes.

    Attributes:
        common: what it shares with an IsoFLOP sweep (name, data, model, optimizer, seeds, resources, ...).
        mixes: weights of each candidate, numbers or a rule; the others are held against the first.
        width: d_model of all cells.
        tokens: D of every cell.
        sequences: batch, in sequences.
        anneal: train the stable phase of a WSD run once a seed, on data.weights, and give each candidate a decay of its
            own from its last checkpoint; False: a whole run each.
        score: weight of each source in the mean of bits per byte that candidates are ranked by; empty: all alike.
    """

    common: SweepConfig
    mixes: dict[str, dict[str, Any]]
    width: int
    tokens: float
    sequences: int = 4
    anneal: bool = False
    score: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.mixes) < 2:
            raise ConfigError("mixes: give at least two candidates, such as even: {prose: 1, code: 1}")
        if self.width < 1 or self.sequences < 1 or not self.tokens > 0:
            raise ConfigError("width, sequences and tokens must be positive")
        if not self.anneal and self.common.data.weights is not None:
            raise ConfigError("data.weights: each of mixes has its own; remove it, or set anneal: true")
        if self.anneal and self.common.resources.processes > 1:
            raise ConfigError("anneal: stable phases are trained in one process; set resources.processes to 1")
        if any(not (math.isfinite(w) and w >= 0) for w in self.score.values()) or (
            self.score and not any(self.score.values())
        ):
            raise ConfigError(f"score: weights must be 0 or more with one above 0, got {self.score}")


@dataclass(frozen=True)
class Candidate:
    """A cell and the mix it tries.

    Attributes:
        mix: name of the candidate.
        given: weights as the config has them.
        weights: as numbers, summing to 1.
        drawn: tokens drawn with them: of the whole run, or of its decay.
    """

    cell: Cell
    mix: str
    given: dict[str, Any]
    weights: dict[str, float]
    drawn: int

    @property
    def label(self) -> str:
        """Short name for people: even-s0."""
        return f"{self.mix}-s{self.cell.seed}"


def load_mix_sweep(path: str | Path, overrides: Mapping[str, Any] | None = None) -> MixSweep:
    """Read a sweep's YAML.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a value of the wrong kind, or one out of range.
    """
    return load(path, overrides, parse_mix_sweep, "conf/sweep/mix.yaml")


def parse_mix_sweep(raw: Mapping[str, Any]) -> MixSweep:
    """A MixSweep from plain values, as load_mix_sweep."""
    rest = dict(raw)
    check_names(rest, _OWNED, ("mixes", "width", "tokens"), "a mix sweep")
    width, tokens = whole(rest.pop("width"), "width"), real(rest.pop("tokens"), "tokens")
    more: dict[str, Any] = {"mixes": _mixes(rest.pop("mixes"))}
    if "sequences" in rest:
        more["sequences"] = whole(rest.pop("sequences"), "sequences")
    more["anneal"] = rest.pop("anneal", False)
    if not isinstance(more["anneal"], bool):
        raise ConfigError(f"anneal must be true or false, got {more['anneal']!r}")
    score = rest.pop("score", None) or {}
    if not isinstance(score, Mapping):
        raise ConfigError(f"score must name sources and weights, got {score!r}")
    more["score"] = {str(name): real(weight, f"score.{name}") for name, weight in score.items()}
    mode = "trunk" if more["anneal"] else "runs"
    common = parse_config({"experiment": "scalewright-mix", **rest, "mode": mode, "budgets": {1.0: [max(width, 1)]}})
    return MixSweep(common, width=width, tokens=tokens, **more)


def _mixes(value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise ConfigError("mixes must name candidates and their weights, such as even: {prose: 1, code: 1}")
    for name, weights in value.items():
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigError(f"mixes.{name} must be weights, such as {{prose: 1, code: 1}}, got {weights!r}")
        if "/" in str(name):
            raise ConfigError(f"mixes.{name}: a name must be a plain word")
    return {str(name): dict(weights) for name, weights in value.items()}


def build_mix_grid(sweep: MixSweep, corpus: Corpus) -> list[Candidate]:
    """All candidates, seed by seed.

    Raises:
        ConfigError: runs that are too short, an unknown source, a mix that cannot be, or two that are the same.
    """
    unknown = [name for name in sweep.score if name not in corpus.train_tokens]
    if unknown:
        raise ConfigError(f"score: unknown source '{unknown[0]}'; prepared sources: {', '.join(corpus.train_tokens)}")
    found = [make_candidate(sweep, corpus, name, seed) for seed in sweep.common.seeds for name in sweep.mixes]
    names: dict[str, str] = {}
    for candidate in found:
        twin = names.setdefault(candidate.cell.cell_id, candidate.mix)
        if twin != candidate.mix:
            raise ConfigError(f"mixes: {twin} and {candidate.mix} are the same; drop one")
    return found


def make_candidate(sweep: MixSweep, corpus: Corpus, name: str, seed: int) -> Candidate:
    """One run."""
    config = sweep.common
    model = model_config(config, sweep.width, corpus.vocab_size)
    cell = cell_of_tokens(config, model, sweep.tokens, sweep.sequences, config.lr, seed)
    given = sweep.mixes[name]
    data: dict[str, Any] = {"stable": config.data.weights, "anneal": given} if sweep.anneal else given
    hashed = dataclasses.replace(config, data=dataclasses.replace(config.data, weights=data))
    cell = dataclasses.replace(cell, cell_id=cell_id(cell, hashed, corpus))
    start = wsd_decay_start(cell.steps, schedule_of(cell, config)) if sweep.anneal else 0
    drawn = (cell.steps - start) * cell.global_batch_tokens
    try:
        weights = _as_numbers(given, corpus, drawn)
    except ConfigError as error:
        raise ConfigError(f"mixes.{name}: {error}") from None
    return Candidate(cell, name, given, weights, drawn)


def _as_numbers(given: Mapping[str, Any], corpus: Corpus, drawn: int) -> dict[str, float]:
    weights = settled_weights(given, corpus.train_tokens, drawn)
    for source in weights:
        if base_of(source, corpus.train_tokens) not in corpus.train_tokens:
            raise ConfigError(f"unknown source '{source}'; prepared sources: {', '.join(corpus.train_tokens)}")
    if rule_of(given, corpus.train_tokens) is None and any(not (math.isfinite(w) and w >= 0) for w in weights.values()):
        raise ConfigError(f"weights must be 0 or more, got {dict(weights)}")
    if not any(weights.values()):
        raise ConfigError("one weight must be above 0")
    return shares_of(weights)


def mix_table(candidates: Sequence[Candidate], corpus: Corpus, max_epochs: float) -> tuple[str, list[str]]:
    """(the candidates as text: shares and epochs of each source; warnings above max_epochs)."""
    first = candidates[0]
    seeds = len({candidate.cell.seed for candidate in candidates})
    lines = [
        f"{first.cell.n_params:,} parameters (width {first.cell.model.d_model}), {first.cell.tokens:,} tokens a run,"
        f" {first.drawn:,} of them with the candidate's weights, {seeds} seed{'s' if seeds > 1 else ''}"
    ]
    warnings = []
    wide = max(len(candidate.mix) for candidate in candidates) + 2
    for candidate in candidates:
        if candidate.cell.seed != first.cell.seed:
            continue
        parts = []
        for source, share in candidate.weights.items():
            unique = corpus.train_tokens.get(source, 0)  # a slice's are not known here
            epochs = share * candidate.drawn / unique if unique else math.nan
            parts.append(f"{source} {share:.1%}" + ("" if math.isnan(epochs) else f" ({epochs:.2f} epochs)"))
            if epochs > max_epochs:
                warnings.append(
                    f"mix {candidate.mix} reads {source} {epochs:.1f} times ({unique:,} unique tokens), max_epochs is"
                    f" {max_epochs:g}"
                )
        lines.append(f"{candidate.mix:<{wide}}{', '.join(parts)}")
    return "\n".join(lines), warnings
