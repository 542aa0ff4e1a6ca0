"""The parameter table as text: what the optimizer does with each parameter."""

from __future__ import annotations

import torch

from lm.config import ModelConfig
from lm.init import init_std, parameter_kind
from lm.model import Llama
from lm.optim.config import OptimConfig
from lm.optim.groups import parameter_rows


def parameter_table(model: ModelConfig, optim: OptimConfig) -> list[tuple[str, ...]]:
    """A header, then of each parameter: name, shape, kind, optimizer, peak learning rate, weight decay, init std."""
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Llama(model).named_parameters()}
    lines: list[tuple[str, ...]] = [("name", "shape", "kind", "optimizer", "lr", "weight_decay", "init_std")]
    for row in parameter_rows(shapes, model, optim):
        shape = " x ".join(map(str, shapes[row.name]))
        numbers = (f"{row.lr:.6g}", f"{row.weight_decay:g}", _init(row.name, model))
        lines.append((row.name, shape, row.kind, row.optimizer, *numbers))
    return lines


def _init(name: str, model: ModelConfig) -> str:
    kind = parameter_kind(name)
    if kind == "norm":
        return "1 (constant)"
    return "0 (constant)" if kind == "head" and model.zero_init_head else f"{init_std(name, model):.6g}"
