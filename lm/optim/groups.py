"""Which parameter gets which optimizer, learning rate and weight decay: one table, by the parameter's name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from lm.config import ModelConfig
from lm.init import parameter_kind
from lm.optim.config import MuonConfig, OptimConfig


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
