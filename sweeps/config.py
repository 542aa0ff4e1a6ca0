"""What an IsoFLOP sweep is, read from YAML. No torch, no Ray: a grid can be planned anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from lm.optim.config import MuonConfig, OptimConfig
from lm.optim.schedule import ScheduleConfig
from sweeps.parsing import as_list, load, make, real, whole
from sweeps.rules import (
    MODES,
    BatchRule,
    DataSection,
    DepthRule,
    HorizonRule,
    Resources,
    Retries,
    SizeRule,
    WarmupRule,
)  # fmt: skip


@dataclass(frozen=True)
class SweepConfig:
    """An IsoFLOP sweep.

    Attributes:
        name: of the sweep; with the grid it decides what --resume continues.
        experiment: MLflow experiment of parent and cells.
        budgets: FLOPs of each IsoFLOP curve -> widths (d_model) tried on it; no widths where `sizes` finds them.
        sizes: rule that finds each budget's widths; None: they are listed.
        depth: rule of the number of layers.
        mode: runs (each cell is a run of its own) or trunk (see sweeps.trunks).
        seeds: each cell runs once per seed (initial values and data order).
        data: corpus.
        model: fields of lm.config.ModelConfig but vocab_size, d_model and n_heads, which follow from corpus and grid.
        d_head: head size aimed at; each width takes its even divisor nearest to it, at most a factor 2 away.
        optim: fields of lm.optim.config.OptimConfig; the warmup follows from its own rule.
        batch: rule of the batch size.
        warmup: rule of the warmup.
        lr_horizon: rule of the learning rate over the run's length.
        tolerance: largest relative distance of a cell's FLOPs from its budget.
        min_steps: a cell with fewer optimizer steps is an error.
        max_epochs: passes over a source above which a warning is printed.
        precision: of Lightning's Trainer, the same for all cells.
        runs_dir: folder of Ray's files and of the result.
        resources: of one trial.
        max_failures: times a trial whose process died is started again.
        retries: times a cell that failed or diverged is tried again.
    """

    name: str
    budgets: dict[float, tuple[int, ...]]
    experiment: str = "scalewright"
    sizes: SizeRule | None = None
    depth: DepthRule = field(default_factory=DepthRule)
    mode: str = "runs"
    seeds: tuple[int, ...] = (0,)
    data: DataSection = field(default_factory=DataSection)
    model: dict[str, Any] = field(default_factory=dict)
    d_head: int = 32
    optim: dict[str, Any] = field(default_factory=dict)
    batch: BatchRule = field(default_factory=BatchRule)
    warmup: WarmupRule = field(default_factory=WarmupRule)
    lr_horizon: HorizonRule = field(default_factory=HorizonRule)
    tolerance: float = 0.01
    min_steps: int = 50
    max_epochs: float = 4.0
    precision: str = "32-true"
    runs_dir: str = "runs"
    resources: Resources = field(default_factory=Resources)
    max_failures: int = 2
    retries: Retries = field(default_factory=Retries)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ConfigError(f"name must be a plain word, got {self.name!r}")
        if not self.budgets:
            raise ConfigError("budgets is empty: give FLOPs and the widths to try, such as 1.0e+12: [32, 48, 64]")
        for budget, widths in self.budgets.items():
            if not (math.isfinite(budget) and budget > 0):
                raise ConfigError(f"budgets: {budget:g} is not a positive number of FLOPs")
            if self.sizes is not None and widths:
                raise ConfigError(f"budgets: {budget:g} names widths, and sizes would find others: keep one of the two")
            if self.sizes is None and (not widths or any(width < 1 for width in widths)):
                raise ConfigError(f"budgets: {budget:g} needs a list of widths, all positive, got {list(widths)}")
            if len(set(widths)) != len(widths):
                raise ConfigError(f"budgets: {budget:g} names a width twice: {list(widths)}")
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        self._check_optim()
        self._check_trunk()
        if self.precision == "auto":
            raise ConfigError("precision auto would differ between the cells of a sweep; take 32-true or bf16-mixed")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be different whole numbers, got {list(self.seeds)}")
        if not 0 < self.tolerance < 1 or self.min_steps < 1 or self.max_failures < 0:
            raise ConfigError("tolerance must be in (0, 1), min_steps at least 1, max_failures not negative")

    @property
    def lr(self) -> float:
        """Peak learning rate that `optim` names.

        Raises:
            ConfigError: it is no number.
        """
        return real(self.optim.get("lr", 3e-4), "optim.lr")

    def _check_optim(self) -> None:
        """Names and values; what a cell's run would refuse is refused before the first one starts."""
        parts: dict[str, type] = {"schedule": ScheduleConfig, "muon": MuonConfig}
        if not isinstance(self.optim, Mapping):
            raise ConfigError(f"optim must be a set of settings, got {self.optim!r}")
        values = dict(self.optim)
        for name, kind in parts.items():
            if name in values:
                values[name] = make(kind, values[name], f"optim.{name}")
        if "betas" in values:
            values["betas"] = tuple(real(beta, "optim.betas") for beta in as_list(values["betas"], "optim.betas"))
        make(OptimConfig, values, "optim")

    def _check_trunk(self) -> None:
        """What one stable phase for several budgets asks for."""
        if self.mode != "trunk":
            return
        if (kind := self.optim.get("schedule", {}).get("kind", "cosine")) != "wsd":
            raise ConfigError(
                f"mode trunk needs optim.schedule.kind wsd, whose rate does not know the length; got {kind}"
            )
        if self.lr_horizon.exponent:
            raise ConfigError(
                "mode trunk: one trunk has one learning rate for all budgets; leave lr_horizon.exponent at 0"
            )
        if self.resources.processes > 1:
            raise ConfigError(
                "mode trunk trains each size in one process; set resources.processes to 1 or mode to runs"
            )


_SECTIONS: dict[str, type] = {
    "data": DataSection, "batch": BatchRule, "warmup": WarmupRule, "resources": Resources, "depth": DepthRule,
    "lr_horizon": HorizonRule, "retries": Retries, "sizes": SizeRule,
}  # fmt: skip


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> SweepConfig:
    """Read a sweep's YAML.

    Args:
        overrides: top-level values that win over the file's.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a value of the wrong kind, or one out of range.
    """
    return load(path, overrides, parse_config, "conf/sweep/demo.yaml")


def parse_config(raw: Mapping[str, Any]) -> SweepConfig:
    """A SweepConfig from plain values, as load_config."""
    values = dict(raw)
    if "early_stop" in values:
        raise ConfigError(
            "early_stop: an IsoFLOP cell is never stopped early, the loss at its own end is what it measures; remove it"
            " (sweeps.mup_lr can stop runs)"
        )
    for name, section in _SECTIONS.items():
        if name not in values or (name == "sizes" and values[name] is None):
            continue
        content = values[name]
        if name == "sizes" and isinstance(content, Mapping) and "tokens_per_parameter" in content:
            content = {**content, "tokens_per_parameter": _range(content["tokens_per_parameter"])}
        values[name] = make(section, content, name)
    if "budgets" in values:
        values["budgets"] = _budgets(values["budgets"], values.get("sizes") is not None)
    if "seeds" in values:
        values["seeds"] = tuple(whole(seed, "seeds") for seed in as_list(values["seeds"], "seeds"))
    return make(SweepConfig, values, "")


def _range(value: Any) -> tuple[float, float]:
    ends = [real(end, "sizes.tokens_per_parameter") for end in as_list(value, "sizes.tokens_per_parameter")]
    if len(ends) != 2:
        raise ConfigError(f"sizes.tokens_per_parameter must be [low, high], got {value!r}")
    return ends[0], ends[1]


def _budgets(value: Any, solved: bool) -> dict[float, tuple[int, ...]]:
    """FLOPs and widths, or, where a rule finds the widths, a list of FLOPs."""
    if isinstance(value, list | tuple):
        if not solved:
            raise ConfigError("budgets is a list of FLOPs: add sizes, the rule that finds widths, or list them")
        value = {str(budget): () for budget in value} if len(set(map(str, value))) == len(value) else None
        if value is None:
            raise ConfigError("budgets names a number of FLOPs twice")
    if not isinstance(value, Mapping):
        raise ConfigError("budgets must name FLOPs and widths, such as 1.0e+12: [32, 48, 64]")
    table = {
        real(budget, "budgets"): tuple(
            whole(w, f"budgets.{budget}") for w in as_list([] if widths is None else widths, f"budgets.{budget}")
        )
        for budget, widths in value.items()
    }
    if len(table) != len(value):
        raise ConfigError("budgets names a number of FLOPs twice")
    return table
