"""Initial values as a pure function of (seed, parameter name, shape): no strategy, shard or rank changes them."""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lm.config import ModelConfig

_OUTPUT_PROJECTIONS = ("attention.wo.weight", "mlp.w_down.weight")


def parameter_kind(name: str) -> str:
    """'embedding', 'head', 'norm' or 'hidden', by the parameter's name.

    By name and not by number of dimensions: under ZeRO-3 every parameter is flat.
    """
    parts = name.split(".")
    if parts[0] in ("embedding", "head"):
        return parts[0]
    return "norm" if parts[-2].endswith("norm") else "hidden"


def init_std(name: str, config: ModelConfig) -> float:
    """Standard deviation of the parameter's normal init.

    The embedding gets config.embedding_init_std. Hidden matrices get config.init_std, output projections divided by
    sqrt(2 L) (GPT-2), and under muP all hidden matrices divided by sqrt(m) (arXiv 2203.03466, table 8).
    """
    std = config.init_std
    if parameter_kind(name) == "embedding":
        return config.embedding_init_std or std
    if parameter_kind(name) == "hidden":
        std /= math.sqrt(config.width_multiplier)
        if config.depth_scaled_init and name.endswith(_OUTPUT_PROJECTIONS):
            std /= math.sqrt(2 * config.n_layers)
    return std


def init_tensor(name: str, shape: torch.Size | tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The whole parameter `name` at step 0, [*shape] fp32 on the CPU."""
    kind = parameter_kind(name)
    if kind == "norm":
        return torch.ones(shape)
    if kind == "head" and config.zero_init_head:
        return torch.zeros(shape)
    key = hashlib.sha256(f"init:{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little"))
    return torch.empty(shape).normal_(0.0, init_std(name, config), generator=generator)


class WeightSource(Protocol):
    """Where initial values come from when they are not random; see lm.hf_weights.HFWeights."""

    def fill(self, name: str, parameter: Tensor) -> None:
        """Copy the value of `name` into the parameter; into a DTensor, this rank's part of it."""


@torch.no_grad()
def materialize(
    model: nn.Module,
    config: ModelConfig,
    seed: int,
    device: torch.device | str,
    source: WeightSource | None = None,
) -> None:
    """Give a model built on the meta device memory on `device` and its initial values, one parameter at a time.

    Sharded parameters (DTensor) take their part of the whole tensor; no rank sends anything.

    Args:
        source: of the values; None draws them from `seed`.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        if source is not None:
            source.fill(name, parameter)
            continue
        whole = init_tensor(name, parameter.shape, config, seed)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)
