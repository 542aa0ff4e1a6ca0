"""How later stages of a plan come about: each owner says what changes and when, and what it leaves out stays as it was.

So a callback that changes the mix and one that changes the sequence length need not know of each other, and their order
does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from lm.data.plan import Stage
from lm.data.ramp import BatchRamp
from lm.data.slices import parse_slice
from lm.errors import ConfigError


@dataclass(frozen=True)
class LongDocuments:
    """Splits each source of a mix in two by the length of its documents, and sets how much comes from the longer ones.

    Attributes:
        min_tokens: tokens, end-of-text included, from which a document is long.
        share: of each source's weight that goes to its long documents; 1 drops the others.
    """

    min_tokens: int
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.min_tokens < 2:
            raise ConfigError(f"long_documents.min_tokens must be at least 2, got {self.min_tokens}")
        if not 0 < self.share <= 1:
            raise ConfigError(f"long_documents.share must be above 0 and at most 1, got {self.share}")

    def split(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The mix with each source as `source[>=N]` and `source[<N]`; slices that it names already stay."""
        mix: dict[str, float] = {}
        for name, weight in weights.items():
            if weight == 0 or parse_slice(name) is not None:
                mix[name] = weight
                continue
            mix[f"{name}[>={self.min_tokens}]"] = weight * self.share
            if self.share < 1:
                mix[f"{name}[<{self.min_tokens}]"] = weight * (1 - self.share)
        return mix


@dataclass(frozen=True)
class StageChange:
    """What is different from `from_tokens` on; None leaves a field as it was.

    Attributes:
        from_tokens: training tokens before it; it begins with the first step at or after them.
        sequence_length: T, tokens a window.
        weights: share of each source, or a rule (lm.data.mix).
        long_documents: how each source's share is split by length; goes on under later weights.
    """

    from_tokens: int
    sequence_length: int | None = None
    weights: Mapping[str, Any] | None = None
    long_documents: LongDocuments | None = None


# Numbers of weights as a config gives them, for the steps from one on up to another (None: the end of the run), and the
# stages before them.
Settle = Callable[[Mapping[str, Any], int, int | None, Sequence[Stage]], Mapping[str, float]]

_CHANGED = tuple(field.name for field in fields(StageChange) if field.name != "from_tokens")


def _as_given(weights: Mapping[str, Any], step: int, stop: int | None, before: Sequence[Stage]) -> Mapping[str, float]:
    return weights


def stages_of(
    first: Stage, ramp: BatchRamp, changes: Mapping[str, Sequence[StageChange]], settle: Settle = _as_given
) -> tuple[Stage, ...]:
    """The stages of a plan: `first`, and one for each step at which somebody changes something.

    Args:
        changes: by the name of their owner, for messages; in any order.
        settle: makes numbers of weights; asked once for each mix, in the order of their steps.

    Raises:
        ConfigError: one owner's changes do not come one after the other, one is at the beginning, or two owners set the
            same thing at the same step.
    """
    points: dict[int, dict[str, tuple[Any, str]]] = {}
    tokens: dict[int, int] = {}
    for owner in sorted(changes):
        _check_order(owner, changes[owner], ramp)
        for change in changes[owner]:
            step = ramp.first_step_at(change.from_tokens)
            tokens[step] = max(change.from_tokens, tokens.get(step, 0))
            _put(points.setdefault(step, {}), change, owner, step)
    mixes = [step for step in sorted(points) if "weights" in points[step]]  # where another mix begins
    current: dict[str, Any] = {
        "sequence_length": first.sequence_length,
        "weights": settle(first.weights, 0, mixes[0] if mixes else None, ()),
        "long_documents": None,
    }
    stages = [replace(first, weights=current["weights"])]
    for step in sorted(points):
        current |= {name: value for name, (value, _) in points[step].items()}
        if step in mixes:
            stop = next((later for later in mixes if later > step), None)
            current["weights"] = settle(current["weights"], step, stop, stages)
        long_documents = current["long_documents"]
        weights = current["weights"] if long_documents is None else long_documents.split(current["weights"])
        stages.append(Stage(tokens[step], current["sequence_length"], weights))
    return tuple(stages)


def _check_order(owner: str, changes: Sequence[StageChange], ramp: BatchRamp) -> None:
    starts = [ramp.first_step_at(change.from_tokens) for change in changes]
    if any(change.from_tokens < 1 for change in changes):
        raise ConfigError(
            f"{owner}: a later stage starts at {min(change.from_tokens for change in changes)} tokens; what holds from"
            " the beginning is data.sequence_length, data.weights and model.config"
        )
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ConfigError(
            f"{owner}: stages must start at increasing from_tokens, at least one step apart, got"
            f" {[change.from_tokens for change in changes]} (steps {starts})"
        )


def _put(point: dict[str, tuple[Any, str]], change: StageChange, owner: str, step: int) -> None:
    for name in _CHANGED:
        value = getattr(change, name)
        if value is None:
            continue
        if name in point:
            raise ConfigError(
                f"{point[name][1]} and {owner} both set {name} at step {step}; leave it to one of them, or move one"
            )
        point[name] = value, owner
