"""Which parameter gets which learning rate and weight decay: one table, by the parameter's name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.init import parameter_kind
from lm.optim.schedule import ScheduleConfig


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) and its schedule.

    Attributes:
        lr: peak learning rate of embedding, norms and head, and of hidden matrices too unless muP scales them.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of hidden matrices; embedding, head and norms have none.
        schedule: shape of the learning rate over the run.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"optim.lr must be positive, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be two numbers in [0, 1), got {self.betas}")
        if self.weight_decay < 0 or self.eps <= 0:
            raise ConfigError("optim.weight_decay must not be negative and optim.eps must be positive")


@dataclass(frozen=True)
class ParameterRow:
    """One line of the table: lr = peak lr x lr_multiplier."""

    name: str
    kind: str
    lr_multiplier: float
    weight_decay: float


def parameter_rows(names: Iterable[str], model: ModelConfig, optim: OptimConfig) -> list[ParameterRow]:
    """The table, in the order of `names`. Under muP hidden matrices get 1 / m (arXiv 2203.03466, table 8)."""
    rows = []
    for name in names:
        kind = parameter_kind(name)
        hidden = kind == "hidden"
        rows.append(
            ParameterRow(
                name=name,
                kind=kind,
                lr_multiplier=1 / model.width_multiplier if hidden else 1.0,
                weight_decay=optim.weight_decay if hidden else 0.0,
            )
        )
    return rows


def parameter_groups(model: nn.Module, config: ModelConfig, optim: OptimConfig) -> list[dict]:
    """Optimizer groups: parameters whose rows agree, in order of first appearance."""
    parameters = dict(model.named_parameters())
    groups: dict[tuple[float, float], dict] = {}
    for row in parameter_rows(parameters, config, optim):
        key = (row.lr_multiplier, row.weight_decay)
        group = groups.setdefault(
            key,
            {
                "params": [],
                "lr": optim.lr * row.lr_multiplier,
                "peak_lr": optim.lr * row.lr_multiplier,
                "weight_decay": row.weight_decay,
            },
        )
        group["params"].append(parameters[row.name])
    return list(groups.values())
