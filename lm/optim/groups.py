"""Which parameter gets which optimizer, learning rate and weight decay: one table, by the parameter's name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.init import parameter_kind
from lm.optim.schedule import ScheduleConfig


@dataclass(frozen=True)
class MuonConfig:
    """Muon on the hidden matrices (optim.name muon).

    Attributes:
        lr: peak learning rate; null: optim.lr, which is what the scaling match_rms_adamw is for.
        momentum: of the gradient's running mean.
        nesterov: look one step ahead of the momentum.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: of their matrix products: bfloat16, float32, or auto, bfloat16 on CUDA and float32 on a CPU.
        weight_decay: decoupled decay of the matrices; null: optim.weight_decay.
        scaling: of the update by the matrix's shape: match_rms_adamw or original, see lm.optim.muon.update_scale.
    """

    lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_dtype: str = "auto"
    weight_decay: float | None = None
    scaling: str = "match_rms_adamw"

    def __post_init__(self) -> None:
        if self.scaling not in ("match_rms_adamw", "original"):
            raise ConfigError(f"optim.muon.scaling must be match_rms_adamw or original, got {self.scaling!r}")
        if self.lr is None and self.scaling == "original":
            raise ConfigError(
                "optim.muon.scaling original has a learning rate of its own: set optim.muon.lr (say 0.02)"
            )
        if self.lr is not None and not self.lr > 0:
            raise ConfigError(f"optim.muon.lr must be positive, or null for optim.lr, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.muon.momentum must be in [0, 1), got {self.momentum}")
        if not 1 <= self.ns_steps < 100:
            raise ConfigError(f"optim.muon.ns_steps must be from 1 to 99, got {self.ns_steps}")
        if self.ns_dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"optim.muon.ns_dtype must be auto, bfloat16 or float32, got {self.ns_dtype!r}")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ConfigError(f"optim.muon.weight_decay must not be negative, got {self.weight_decay}")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), or Muon and AdamW, and the schedule.

    Attributes:
        name: adamw: all parameters; muon: Muon for hidden matrices, AdamW for embedding, norms and head.
        lr: peak learning rate of embedding, norms and head, and of hidden matrices too unless muP scales them.
        betas: AdamW's decay rates of the two moments.
        eps: added to the root of AdamW's second moment.
        weight_decay: decoupled decay of hidden matrices; embedding, head and norms have none.
        schedule: shape of the learning rate over the run, the same for all parameters.
        muon: settings of Muon.
    """

    name: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "muon"):
            raise ConfigError(f"optim.name must be adamw or muon, got {self.name!r}")
        if not self.lr > 0:
            raise ConfigError(f"optim.lr must be positive, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be two numbers in [0, 1), got {self.betas}")
        if self.weight_decay < 0 or self.eps <= 0:
            raise ConfigError("optim.weight_decay must not be negative and optim.eps must be positive")


@dataclass(frozen=True)
class ParameterRow:
    """One line of the table.

    Attributes:
        name: of the parameter.
        kind: embedding, head, norm or hidden.
        optimizer: adamw or muon.
        lr_multiplier: muP's factor on the optimizer's peak rate.
        lr: peak learning rate, the multiplier included.
        weight_decay: decoupled: a step takes away lr x weight_decay of the parameter.
    """

    name: str
    kind: str
    optimizer: str
    lr_multiplier: float
    lr: float
    weight_decay: float


def parameter_rows(names: Iterable[str], model: ModelConfig, optim: OptimConfig) -> list[ParameterRow]:
    """The table, in the order of `names`. A tied head has no row: it is the embedding, and never Muon's."""
    return [_row(name, parameter_kind(name), model, optim) for name in names]


def _row(name: str, kind: str, model: ModelConfig, optim: OptimConfig) -> ParameterRow:
    if kind != "hidden":
        return ParameterRow(name, kind, "adamw", 1.0, optim.lr, 0.0)
    if optim.name == "adamw":
        multiplier = 1 / model.width_multiplier
        return ParameterRow(name, kind, "adamw", multiplier, optim.lr * multiplier, optim.weight_decay)
    multiplier = muon_lr_multiplier(model.width_multiplier, optim.muon.scaling)
    lr = optim.lr if optim.muon.lr is None else optim.muon.lr
    decay = optim.weight_decay if optim.muon.weight_decay is None else optim.muon.weight_decay
    return ParameterRow(name, kind, "muon", multiplier, lr * multiplier, decay)


def muon_lr_multiplier(m: float, scaling: str) -> float:
    """muP's factor on Muon's rate at width multiplier m (AdamW's is 1 / m: arXiv 2203.03466, table 8).

    Features keep their size when the update of a matrix has spectral norm c sqrt(rows / cols), c free of the width
    (Yang, Simon and Bernstein 2023, arXiv 2310.17813, condition 1). Both sides of a hidden matrix grow with m, so the
    wanted norm does not depend on m. Muon's update has spectral norm lr x update_scale: `original` keeps it, factor 1;
    `match_rms_adamw` lets it grow as sqrt(max(rows, cols)) ~ sqrt(m), factor 1 / sqrt(m).
    """
    return 1.0 if scaling == "original" else 1 / math.sqrt(m)


def parameter_groups(model: nn.Module, config: ModelConfig, optim: OptimConfig) -> list[dict]:
    """Optimizer groups: parameters whose rows agree, in order of first appearance.

    `lr` is set anew each step; `peak_lr` is what the schedule multiplies.
    """
    parameters = dict(model.named_parameters())
    groups: dict[tuple[str, float, float], dict] = {}
    for row in parameter_rows(parameters, config, optim):
        key = (row.optimizer, row.lr, row.weight_decay)
        if key not in groups:
            common = {"lr": row.lr, "peak_lr": row.lr, "weight_decay": row.weight_decay, "optimizer": row.optimizer}
            own = _muon_settings(optim.muon, parameters[row.name].device.type) if row.optimizer == "muon" else {}
            groups[key] = {"params": [], **common, **own}
        groups[key]["params"].append(parameters[row.name])
    return list(groups.values())


def _muon_settings(muon: MuonConfig, device_type: str) -> dict:
    auto = "bfloat16" if device_type == "cuda" else "float32"
    return {
        "momentum": muon.momentum,
        "nesterov": muon.nesterov,
        "ns_steps": muon.ns_steps,
        "ns_dtype": auto if muon.ns_dtype == "auto" else muon.ns_dtype,
        "scaling": muon.scaling,
    }
