"""Hybrid sharding: fully sharded inside a group of devices, copies of the group beside each other."""

from __future__ import annotations

from typing import Any

from lm.errors import ConfigError
from plugins.strategies.fsdp import FSDP


class HSDP(FSDP):
    """fully_shard over a (replicate, shard) mesh: parameters are gathered inside a group, usually a node, only.

    With tensor_parallel a tensor group counts as one device here: replicate x shard x tensor_parallel devices.
    context_parallel changes nothing of that: it spreads windows, not parameters.

    Args:
        replicate: copies of the model; None is the number of nodes, or what `shard` leaves.
        shard: devices that share one copy; None is the devices of a node, or what `replicate` leaves.
        kwargs: see FSDP.
    """

    strategy_name = "hsdp"

    def __init__(self, replicate: int | None = None, shard: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.replicate = replicate
        self.shard = shard

    def data_mesh_sizes(self) -> dict[str, int]:
        per_node = self.num_processes // self.tensor_parallel
        replicate, shard = mesh_sizes(self.replicate, self.shard, self.num_nodes, per_node)
        return {"replicate": replicate, "shard": shard}


def mesh_sizes(replicate: int | None, shard: int | None, n_nodes: int, n_devices: int) -> tuple[int, int]:
    """(replicate, shard) whose product is n_nodes x n_devices (devices per node).

    Raises:
        ValueError: the asked sizes do not cover the devices exactly.
    """
    world = n_nodes * n_devices
    given = replicate if replicate is not None else shard
    if given is not None and (given < 1 or world % given != 0):
        other = "replicate" if replicate is not None else "shard"
        raise ConfigError(f"hsdp {other} {given} does not divide the {world} devices; choose a divisor of {world}")
    if replicate is None:
        replicate = n_nodes if shard is None else world // shard
    if shard is None:
        shard = world // replicate
    if replicate * shard != world:
        raise ConfigError(
            f"hsdp replicate {replicate} x shard {shard} is {replicate * shard}, but there are {world} devices; "
            "leave one of the two out to have it computed"
        )
    return replicate, shard
