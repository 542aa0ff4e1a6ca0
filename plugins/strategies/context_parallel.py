"""Which ranks share a window of tokens, and the checks before they do; the exchange itself is lm/context_parallel.py.

Ranks are counted with tensor parallelism innermost, then context parallelism: rank = (d n + c) m + t for part d of the
data, part c of n of the window and part t of m of the matrices.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from lm.context_parallel import ContextGroup, check_heads, check_length
from lm.errors import ConfigError


def check_size(strategy_name: str, context_parallel: int) -> None:
    """Raise ConfigError for a number of devices that cannot be meant."""
    if context_parallel < 1:
        raise ConfigError(f"{strategy_name} context_parallel must be at least 1, got {context_parallel}")


def data_part(strategy: Any) -> tuple[int, int]:
    """(d, number of parts of the data).

    Raises:
        ConfigError: the devices do not divide.
    """
    together = strategy.context_parallel * strategy.tensor_parallel
    if strategy.world_size % together:
        tensor = f" x tensor_parallel {strategy.tensor_parallel}" if strategy.tensor_parallel > 1 else ""
        raise ConfigError(
            f"{strategy.strategy_name} context_parallel {strategy.context_parallel}{tensor} does not divide the "
            f"{strategy.world_size} devices; choose a divisor"
        )
    return strategy.global_rank // together, strategy.world_size // together


def head_part(strategy: Any) -> tuple[int, int]:
    """(which part of each layer's query heads attention computes on this rank, number of parts)."""
    m, n, rank = strategy.tensor_parallel, strategy.context_parallel, strategy.global_rank
    return rank % m * n + rank // m % n, m * n  # heads are cut over t first


def share_windows(model: nn.Module, strategy: Any) -> None:
    """Tell a Llama which ranks it shares its windows with; nothing where context_parallel is 1. Collective.

    Raises:
        ConfigError: heads or devices do not divide.
    """
    n, m = strategy.context_parallel, strategy.tensor_parallel
    if n == 1:
        return
    data_part(strategy)
    set_context = getattr(model, "set_context", None)
    if set_context is None:
        raise ConfigError(f"context_parallel needs a Llama, this model is a {type(model).__name__}; leave it out")
    check_heads(model.config, n, m)  # type: ignore[arg-type]
    ranks = window_ranks(strategy.world_size, n, m)
    group, _ = dist.new_subgroups_by_enumeration(ranks)
    set_context(ContextGroup(group, strategy.global_rank // m % n, n))


def window_ranks(world_size: int, context_parallel: int, tensor_parallel: int = 1) -> list[list[int]]:
    """The groups of ranks that share windows, each in the order of its positions."""
    together = context_parallel * tensor_parallel
    return [
        [start + t + c * tensor_parallel for c in range(context_parallel)]
        for start in range(0, world_size, together)
        for t in range(tensor_parallel)
    ]


def check_windows(trainer: Any, context_parallel: int) -> None:
    """Refuse, before training, a stage of the data plan whose windows do not divide.

    Raises:
        ConfigError: see lm.context_parallel.check_length.
    """
    plan = getattr(getattr(trainer, "datamodule", None), "plan", None)
    for stage in getattr(plan, "stages", ()):
        check_length(stage.sequence_length, context_parallel)
