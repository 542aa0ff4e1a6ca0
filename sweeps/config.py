"""What an IsoFLOP sweep is, read from YAML. No torch, no Ray: a grid can be planned anywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from lm.errors import ConfigError

_T = TypeVar("_T")


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
class DataSection:
    """Corpus of the sweep.

    Attributes:
        dir: folder made by `python -m recipes.data prepare`.
        sequence_length: T in tokens.
        weights: share of each source; None takes them in proportion to their tokens.
        validation_windows: windows of each source that the final validation reads.
    """

    dir: str = "data/demo"
    sequence_length: int = 128
    weights: dict[str, float] | None = None
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


@dataclass(frozen=True)
class SweepConfig:
    """An IsoFLOP sweep.

    Attributes:
        name: of the sweep; with the grid it decides what --resume continues.
        experiment: MLflow experiment of parent and cells.
        budgets: FLOPs of each IsoFLOP curve -> widths (d_model) tried on it.
        seeds: each cell runs once per seed (initial values and data order).
        data: corpus.
        model: fields of lm.config.ModelConfig but vocab_size, d_model and n_heads, which follow from corpus and grid.
        d_head: head size aimed at; each width takes its even divisor nearest to it, at most a factor 2 away.
        optim: fields of lm.optim.groups.OptimConfig; the warmup follows from its own rule.
        batch: rule of the batch size.
        warmup: rule of the warmup.
        tolerance: largest relative distance of a cell's FLOPs from its budget.
        min_steps: a cell with fewer optimizer steps is an error.
        max_epochs: passes over a source above which a warning is printed.
        precision: of Lightning's Trainer, the same for all cells.
        runs_dir: folder of Ray's files and of the result.
        resources: of one trial.
        max_failures: times a trial whose process died is started again.
    """

    name: str
    budgets: dict[float, tuple[int, ...]]
    experiment: str = "scalewright"
    seeds: tuple[int, ...] = (0,)
    data: DataSection = field(default_factory=DataSection)
    model: dict[str, Any] = field(default_factory=dict)
    d_head: int = 32
    optim: dict[str, Any] = field(default_factory=dict)
    batch: BatchRule = field(default_factory=BatchRule)
    warmup: WarmupRule = field(default_factory=WarmupRule)
    tolerance: float = 0.01
    min_steps: int = 50
    max_epochs: float = 4.0
    precision: str = "32-true"
    runs_dir: str = "runs"
    resources: Resources = field(default_factory=Resources)
    max_failures: int = 2

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ConfigError(f"name must be a plain word, got {self.name!r}")
        if not self.budgets:
            raise ConfigError("budgets is empty: give FLOPs and the widths to try, such as 1.0e+12: [32, 48, 64]")
        for budget, widths in self.budgets.items():
            if not (math.isfinite(budget) and budget > 0):
                raise ConfigError(f"budgets: {budget:g} is not a positive number of FLOPs")
            if not widths or any(width < 1 for width in widths):
                raise ConfigError(f"budgets: {budget:g} needs a list of widths, all positive, got {list(widths)}")
            if len(set(widths)) != len(widths):
                raise ConfigError(f"budgets: {budget:g} names a width twice: {list(widths)}")
        if self.precision == "auto":
            raise ConfigError("precision auto would differ between the cells of a sweep; take 32-true or bf16-mixed")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be different whole numbers, got {list(self.seeds)}")
        if not 0 < self.tolerance < 1 or self.min_steps < 1 or self.max_failures < 0:
            raise ConfigError("tolerance must be in (0, 1), min_steps at least 1, max_failures not negative")


_SECTIONS: dict[str, type] = {
    "data": DataSection, "batch": BatchRule, "warmup": WarmupRule, "resources": Resources,
}  # fmt: skip


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> SweepConfig:
    """Read a sweep's YAML.

    Args:
        overrides: top-level values that win over the file's.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a value of the wrong kind, or one out of range.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no settings; see conf/sweep/demo.yaml")
    try:
        return parse_config({**raw, **(overrides or {})})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> SweepConfig:
    """A SweepConfig from plain values, as load_config."""
    values = dict(raw)
    if "early_stop" in values:
        raise ConfigError(
            "early_stop: an IsoFLOP cell is never stopped early, the loss at its own end is what it measures; remove it"
            " (sweeps.mup_lr can stop runs)"
        )
    for name, section in _SECTIONS.items():
        if name in values:
            values[name] = _make(section, values[name], name)
    if "budgets" in values:
        values["budgets"] = _budgets(values["budgets"])
    if "seeds" in values:
        values["seeds"] = tuple(_whole(seed, "seeds") for seed in _list(values["seeds"], "seeds"))
    return _make(SweepConfig, values, "")


def _make(kind: type[_T], values: Any, where: str) -> _T:
    prefix = f"{where}." if where else ""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a set of settings, got {values!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise ConfigError(f"unknown setting {prefix}{unknown[0]}; known: {', '.join(fields)}")
    missing = [
        name for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise ConfigError(f"{prefix}{missing[0]} is missing")
    typed = {name: _number(fields[name].type, value, prefix + name) for name, value in values.items()}
    return kind(**typed)


def _number(annotation: Any, value: Any, where: str) -> Any:
    """YAML reads 4e5 as a string, and 4.0 where a whole number is meant: accept both, refuse the rest."""
    if annotation == "int":
        return _whole(value, where)
    if annotation == "float":
        return _real(value, where)
    return value


def _real(value: Any, where: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where} must be a number, got {value!r}") from None


def _whole(value: Any, where: str) -> int:
    number = _real(value, where)
    if not number.is_integer():
        raise ConfigError(f"{where} must be a whole number, got {value!r}")
    return int(number)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, got {value!r}")
    return list(value)


def _budgets(value: Any) -> dict[float, tuple[int, ...]]:
    if not isinstance(value, Mapping):
        raise ConfigError("budgets must name FLOPs and widths, such as 1.0e+12: [32, 48, 64]")
    table = {
        _real(budget, "budgets"): tuple(_whole(w, f"budgets.{budget}") for w in _list(widths, f"budgets.{budget}"))
        for budget, widths in value.items()
    }
    if len(table) != len(value):
        raise ConfigError("budgets names a number of FLOPs twice")
    return table
