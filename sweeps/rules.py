"""The rules of a sweep's cells: batch, warmup, rate, depth, sizes; and what a trial may take. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm.errors import ConfigError

MODES = ("runs", "trunk")


@dataclass(frozen=True)
class BatchRule:
    """Batch size by run length: B = max(min_sequences, round(sequences (D / at_tokens)^exponent)).

    The best batch grows with the run (McCandlish et al. 2018, arXiv 1812.06162): one size for all budgets would
    handicap the small ones.

    Attributes:
        sequences: B of a run of at_tokens tokens.
        at_tokens: see sequences.
        exponent: 0 gives every run the same batch.
        min_sequences: lower bound.
    """

    sequences: float = 4
    at_tokens: float = 4e5
    exponent: float = 0.5
    min_sequences: int = 2

    def __post_init__(self) -> None:
        if self.sequences <= 0 or self.at_tokens <= 0 or self.min_sequences < 1 or not 0 <= self.exponent <= 1:
            raise ConfigError(
                "batch: sequences and at_tokens must be positive, min_sequences at least 1, exponent in [0, 1]"
            )

    def sequences_for(self, tokens: float) -> int:
        """Sequences a batch of a run of `tokens` tokens."""
        return max(self.min_sequences, round(self.sequences * (tokens / self.at_tokens) ** self.exponent))


@dataclass(frozen=True)
class WarmupRule:
    """Warmup by run length: max(min_steps, fraction of the steps), at most half of them.

    A warmup of fixed length is too long for small runs and bends the fitted exponent (Porian et al. 2024,
    arXiv 2406.19146).
    """

    min_steps: int = 20
    fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.min_steps < 0 or not 0 <= self.fraction <= 0.5:
            raise ConfigError("warmup: min_steps must not be negative and fraction must be in [0, 0.5]")

    def steps_for(self, steps: int) -> int:
        """Warmup steps of a run of `steps` steps."""
        return min(max(self.min_steps, round(self.fraction * steps)), steps // 2)


@dataclass(frozen=True)
class HorizonRule:
    """Learning rate by run length: lr (D / at_tokens)^-exponent.

    Off by default, because the sources disagree: at a fixed batch the best rate falls with the length, with an exponent
    near 1/3 (Bjorck et al. 2024, arXiv 2409.19913); where the batch grows with the length as well, Step Law's best rate
    rises, exponent -.307 here (Li et al. 2025, arXiv 2503.04715). Measure it before turning it on.

    Attributes:
        exponent: 0 gives every run the same rate.
        at_tokens: D of a run whose rate is optim.lr.
    """

    exponent: float = 0.0
    at_tokens: float = 1e9

    def __post_init__(self) -> None:
        if not -1 <= self.exponent <= 1 or not self.at_tokens > 0:
            raise ConfigError("lr_horizon: exponent must be in [-1, 1] and at_tokens positive")

    def lr_for(self, lr: float, tokens: float) -> float:
        """Peak rate of a run of `tokens` tokens; exactly `lr` at exponent 0."""
        return lr * (tokens / self.at_tokens) ** -self.exponent if self.exponent else lr


@dataclass(frozen=True)
class DepthRule:
    """Layers by width: n_layers = d_model / d_model_per_layer, rounded, within [min_layers, max_layers].

    Attributes:
        d_model_per_layer: 0 keeps model.n_layers for every width. 64 to 128 is usual; within a factor 2 of it the loss
            hardly changes (Kaplan et al. 2020, arXiv 2001.08361, figure 5).
        min_layers: a single layer cannot copy from context.
        max_layers: 0 for no bound.
    """

    d_model_per_layer: float = 0
    min_layers: int = 2
    max_layers: int = 0

    def __post_init__(self) -> None:
        if not self.d_model_per_layer >= 0 or self.min_layers < 1 or 0 < self.max_layers < self.min_layers:
            raise ConfigError("depth: d_model_per_layer must not be negative, and 1 <= min_layers <= max_layers")

    def layers_for(self, width: int) -> int | None:
        """n_layers of a width; None where the rule is off."""
        if not self.d_model_per_layer:
            return None
        layers = max(self.min_layers, round(width / self.d_model_per_layer))
        return min(layers, self.max_layers) if self.max_layers else layers


@dataclass(frozen=True)
class SizeRule:
    """Sizes of each budget, spread evenly in ln N over a range of tokens per parameter.

    Attributes:
        per_budget: sizes of each budget; 6 to 10 are usual (Hoffmann et al. 2022, arXiv 2203.15556, section 3.2).
        tokens_per_parameter: (low, high) D / N of the largest and of the smallest size; must hold the minimum.
        width_multiple: every width is a multiple of it.
    """

    per_budget: int = 7
    tokens_per_parameter: tuple[float, float] = (5.0, 80.0)
    width_multiple: int = 8

    def __post_init__(self) -> None:
        low, high = self.tokens_per_parameter
        if self.per_budget < 1 or not 0 < low < high or self.width_multiple < 1:
            raise ConfigError(
                "sizes: per_budget and width_multiple must be at least 1, tokens_per_parameter [low, high] with 0 < low"
                " < high"
            )

    def targets(self) -> list[float]:
        """Tokens per parameter aimed at, from the smallest size to the largest."""
        low, high = self.tokens_per_parameter
        if self.per_budget == 1:
            return [(low * high) ** 0.5]
        return [high * (low / high) ** (i / (self.per_budget - 1)) for i in range(self.per_budget)]


@dataclass(frozen=True)
class Retries:
    """How often a cell is tried again within one command; every try is a run in MLflow.

    Attributes:
        failed: tries of a cell that ended with an error. A config that is refused is not tried again.
        diverged: tries of a cell that diverged: on a CPU it would only diverge again, on GPUs sums differ a little.
    """

    failed: int = 1
    diverged: int = 0

    def __post_init__(self) -> None:
        if self.failed < 0 or self.diverged < 0:
            raise ConfigError("retries: failed and diverged must not be negative")


@dataclass(frozen=True)
class DataSection:
    """Corpus of the sweep.

    Attributes:
        dir: folder made by `python -m recipes.data prepare`, or its address in a bucket (s3://, gs://, ...),
            which every machine copies once.
        sequence_length: T in tokens.
        weights: share of each source, or a rule (lm.data.mix); None takes them in proportion to their tokens.
        validation_windows: windows of each source that the final validation reads.
    """

    dir: str = "data/demo"
    sequence_length: int = 128
    weights: dict[str, Any] | None = None
    validation_windows: int = 350

    def __post_init__(self) -> None:
        if self.sequence_length < 2 or self.validation_windows < 1:
            raise ConfigError("data: sequence_length must be at least 2 tokens and validation_windows at least 1")


@dataclass(frozen=True)
class Resources:
    """What one trial takes.

    Attributes:
        cpus: cores of each process; it runs as many threads.
        gpus: devices of each process, may be a fraction: several small trials share one.
        processes: ranks that train one cell, all on one node.
        strategy: of several processes: ddp, fsdp, hsdp, zero1, zero2 or zero3.
        hang_seconds: ranks that finish no batch for so long are ended and go on from the newest checkpoint.
    """

    cpus: int = 1
    gpus: float = 0
    processes: int = 1
    strategy: str = "ddp"
    hang_seconds: float = 600

    def __post_init__(self) -> None:
        if self.cpus < 1 or self.gpus < 0:
            raise ConfigError("resources: cpus must be at least 1 and gpus not negative")
        if self.processes < 1 or self.hang_seconds <= 0:
            raise ConfigError("resources: processes must be at least 1 and hang_seconds positive")
        if self.processes > 1 and self.gpus != int(self.gpus):
            raise ConfigError("resources: each of several processes needs whole gpus, 1 or (on CPUs) 0")

    @property
    def trial_cpus(self) -> int:
        """Cores of all processes of a trial."""
        return self.cpus * self.processes

    @property
    def trial_gpus(self) -> float:
        """Devices of all processes of a trial."""
        return self.gpus * self.processes
