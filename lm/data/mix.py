"""Weights of a mix by a rule, from unique tokens: temperature or unimax, where a config may also give numbers.

    weights: {prose: 2, code: 1}                 numbers
    weights: {temperature: 3.33}                 p_i ~ n_i^(1/T)
    weights: {unimax: {max_epochs: 4}}           as even as possible, no source more than 4 times
    weights: {unimax: {max_epochs: 4}, sources: [prose, "code[>=2048]"]}

A prepared source that is named `temperature` or `unimax` keeps its name: there the mapping gives its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.data.options import real
from lm.data.plan import Stage
from lm.data.ramp import BatchRamp
from lm.data.shards import Manifest
from lm.data.slices import shared_tokens, train_tokens
from lm.errors import ConfigError

TEMPERATURE, UNIMAX = "temperature", "unimax"


@dataclass(frozen=True)
class MixRule:
    """A rule that weights follow from.

    Attributes:
        kind: temperature or unimax.
        value: T, or the most epochs of a source.
        sources: names of sources, or slices of them, that it shares the tokens among; empty: all prepared sources.
    """

    kind: str
    value: float
    sources: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"temperature {self.value:g}" if self.kind == TEMPERATURE else f"unimax, max_epochs {self.value:g}"
        return text + (f" over {', '.join(self.sources)}" if self.sources else "")


def rule_of(weights: Mapping[str, Any], prepared: Iterable[str] = ()) -> MixRule | None:
    """The rule that a config's `weights` ask for; None where they are numbers.

    Raises:
        ConfigError: two rules, a rule beside numbers, or a value out of range.
    """
    odd = [name for name in weights if not isinstance(name, str)]
    if odd:
        raise ConfigError(f"weights: {odd[0]!r} is no name of a source; write it in quotes if it is one")
    named = [kind for kind in (TEMPERATURE, UNIMAX) if kind in weights and kind not in set(prepared)]
    if not named:
        return None
    others = [name for name in weights if name not in (named[0], "sources")]
    if others:
        raise ConfigError(f"weights: {named[0]} is a rule and stands alone or with sources; remove {', '.join(others)}")
    sources = weights.get("sources") or ()
    listed = isinstance(sources, Sequence) and not isinstance(sources, str)
    if not listed or not all(isinstance(one, str) for one in sources) or len(set(sources)) != len(sources):
        raise ConfigError(f"weights: sources must be a list of different names, got {sources!r}")
    return MixRule(named[0], _value(named[0], weights[named[0]]), tuple(sources))


def _value(kind: str, given: Any) -> float:
    if kind == UNIMAX and isinstance(given, Mapping):
        if set(given) != {"max_epochs"}:
            raise ConfigError(f"weights: unimax takes max_epochs, got {', '.join(map(str, given)) or 'nothing'}")
        given = given["max_epochs"]
    value = real(given, f"weights: {kind}")
    if not value > 1e-300 or (kind == UNIMAX and math.isinf(value)):
        raise ConfigError(f"weights: {kind} must be a positive number, got {given!r}")
    return value


def numbers(weights: Mapping[str, Any]) -> dict[str, float]:
    """Weights that are given as numbers.

    Raises:
        ConfigError: one is not a number.
    """
    return {name: real(value, f"weights: {name}") for name, value in weights.items()}


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """The same weights summing to 1, where they can."""
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()} if 0 < total < math.inf else dict(weights)


def temperature_weights(tokens: Mapping[str, float], temperature: float) -> dict[str, float]:
    """p_i ~ n_i^(1/T), summing to 1: T = 1 in proportion to tokens, T -> infinity uniform, T below 1 favours the large.

    Arivazhagan et al. 2019 (arXiv 1907.05019, section 4.2). XLM-R (arXiv 1911.02116, eq. 1) and mT5 (arXiv 2010.11934,
    section 3) give the exponent alpha = 1/T instead: their .3 is T = 3.33.

    Args:
        tokens: n_i, unique tokens; all positive.
        temperature: T > 0; may be infinite.
    """
    logs = {name: math.log(n) / temperature for name, n in tokens.items()}
    top = max(logs.values())
    raw = {name: math.exp(value - top) for name, value in logs.items()}
    whole = sum(raw.values())
    return {name: value / whole for name, value in raw.items()}


def unimax_tokens(caps: Mapping[str, float], budget: float) -> dict[str, float]:
    """Tokens of each source, as even as its cap lets them be: Chung et al. 2023 (arXiv 2304.09151), algorithm 1.

    From the smallest cap up, each source gets an equal part of what is left of the budget, or its cap if that is less.

    Args:
        caps: most tokens of each source, its unique tokens times the most epochs.
        budget: tokens to share out.
    """
    shares: dict[str, float] = {}
    left = float(budget)
    for i, name in enumerate(sorted(caps, key=lambda name: (caps[name], name))):
        shares[name] = min(caps[name], left / (len(caps) - i))
        left -= shares[name]
    return {name: shares[name] for name in caps}


def unimax_weights(
    tokens: Mapping[str, float], budget: float, max_epochs: float, drawn: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Weights summing to 1 with which no source is read more than max_epochs times in `budget` tokens.

    The paper counts characters; here they are tokens, which is what a run has a budget of. It also repeats everything
    beyond N when the budget exceeds what N epochs give; here that is an error.

    Args:
        tokens: unique tokens of each source.
        budget: tokens that are drawn with these weights.
        drawn: tokens that earlier stages take of each source; they count towards max_epochs.

    Raises:
        ConfigError: the sources hold too little text.
    """
    caps = {name: max(0.0, max_epochs * n - (drawn or {}).get(name, 0.0)) for name, n in tokens.items()}
    if sum(caps.values()) < budget * (1 - 1e-9):
        raise ConfigError(
            f"weights: unimax with max_epochs {max_epochs:g} has {sum(caps.values()):,.0f} tokens to give,"
            f" {budget:,.0f} are to be drawn; raise max_epochs, prepare more text or train on fewer tokens"
        )
    shares = unimax_tokens(caps, budget)
    whole = sum(shares.values())
    return {name: share / whole for name, share in shares.items()}


def settled_weights(
    weights: Mapping[str, Any],
    tokens: Mapping[str, int],
    budget: float | None,
    drawn: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Weights as numbers: those of a rule sum to 1, given ones stay as they are.

    Args:
        tokens: unique tokens of every source, and of the slices that a rule names.
        budget: tokens that are drawn with these weights; None: not known.

    Raises:
        ConfigError: bad weights, an unknown source, or unimax where it cannot be.
    """
    rule = rule_of(weights, tokens)
    if rule is None:
        return numbers(weights)
    names = rule.sources or tuple(tokens)
    for name in names:
        if name not in tokens:
            raise ConfigError(f"weights: unknown source '{name}' in sources; prepared sources: {', '.join(tokens)}")
    unique = {name: float(tokens[name]) for name in names if tokens[name] > 0}
    if not unique:
        raise ConfigError(f"weights: {rule}: none of the sources holds a token")
    if rule.kind == TEMPERATURE:
        return temperature_weights(unique, rule.value)
    if budget is None:
        raise ConfigError("weights: unimax needs the length of the run: set tokens")
    return unimax_weights(unique, max(budget, 1.0), rule.value, drawn)


@dataclass(frozen=True)
class Settled:
    """What came of a rule: from `step` on the mix is `weights`."""

    step: int
    rule: MixRule
    weights: Mapping[str, float]

    def plain(self) -> dict[str, Any]:
        """Plain values, for checkpoints and records."""
        rule = {"kind": self.rule.kind, "value": self.rule.value, "sources": list(self.rule.sources)}
        return {"step": self.step, "rule": rule, "weights": dict(self.weights)}

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> Settled:
        """The inverse of `plain`."""
        rule = values["rule"]
        found = MixRule(rule["kind"], float(rule["value"]), tuple(rule["sources"]))
        return Settled(int(values["step"]), found, {name: float(w) for name, w in values["weights"].items()})


class Mixes:
    """Makes numbers of the weights of each stage, while a plan is put together.

    Args:
        manifest: of the data folder.
        ramp: tokens of steps.
        total_tokens: length of the run; None: not known.
        kept: what a checkpoint's rules came to: it stays so, though the run has another length by now.

    Attributes:
        settled: what rules came to, in the order of their steps.
    """

    def __init__(
        self, manifest: Manifest, ramp: BatchRamp, total_tokens: int | None, kept: Sequence[Settled] = ()
    ) -> None:
        self.manifest, self.ramp, self.total_tokens = manifest, ramp, total_tokens
        self.kept = {(one.step, one.rule): one for one in kept}
        self.settled: list[Settled] = []

    def settle(
        self, weights: Mapping[str, Any], step: int, stop: int | None, before: Sequence[Stage]
    ) -> Mapping[str, float]:
        """The mix of the steps from `step` on, up to the one that brings another (None: the end of the run).

        The first one's shares sum to 1, and so do those of stages that go on with it; later ones stay as given.

        Args:
            before: stages of the steps before.
        """
        rule = rule_of(weights, self.manifest.source_names)
        if rule is None:
            return shares_of(numbers(weights)) if step == 0 else numbers(weights)
        found = self.kept.get((step, rule))
        if found is None:
            tokens = train_tokens(self.manifest, rule.sources)
            drawn = self._drawn(before, step, tokens)
            found = Settled(step, rule, settled_weights(weights, tokens, self._budget(step, stop), drawn))
        self.settled.append(found)
        return found.weights

    def _budget(self, step: int, stop: int | None) -> float | None:
        start = self.ramp.tokens(step)
        end = None if stop is None else self.ramp.tokens(stop)
        if self.total_tokens is not None:
            end = self.total_tokens if end is None else min(end, self.total_tokens)
        return None if end is None else float(end - start)

    def _drawn(self, stages: Sequence[Stage], step: int, names: Iterable[str]) -> dict[str, float]:
        """Tokens that the stages before a step take of each name, under whichever name they draw them."""
        starts = [self.ramp.first_step_at(stage.from_tokens) for stage in stages]
        drawn = dict.fromkeys(names, 0.0)
        for stage, start, stop in zip(stages, starts, [*starts, step][1:], strict=True):
            whole = sum(stage.weights.values())
            for name, weight in stage.weights.items():
                tokens = (self.ramp.tokens(stop) - self.ramp.tokens(start)) * weight / whole
                for known in drawn if weight > 0 else ():
                    drawn[known] += tokens * shared_tokens(self.manifest, name, known)
        return drawn


def format_rules(settled: Sequence[Settled]) -> str:
    """One line for each rule and what it came to, with all digits."""
    return "\n".join(
        f"weights from step {one.step:,} on, by {one.rule}: "
        + ", ".join(f"{name} {weight!r}" for name, weight in one.weights.items())
        for one in settled
    )
