"""Counts what this rank sends to others: every collective that torch dispatches, whoever issued it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from lm.planner.communication import RING_FACTORS, ring_bytes

# Name of the op without its namespace: (kind, which argument holds the tensor: whole, but for _PARTS).
_OPS = {
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_to_all_single": ("all_to_all", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
}
_PARTS = {"all_gather_into_tensor"}


class Traffic(TorchDispatchMode):
    """While active, notes collectives of this thread: DDP's, fully_shard's, DeepSpeed's and DTensor's.

    Attributes:
        bytes_of: by (kind, ranks of the group): bytes of the whole tensors, added up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name in _OPS:
            kind, place = _OPS[name]
            key = kind, _ranks(args)
            n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args[place]))
            self.bytes_of[key] += n_bytes * key[1] if name in _PARTS else n_bytes
        return func(*args, **(kwargs or {}))

    def sent_bytes(self) -> dict[str, float]:
        """By kind: bytes this rank sends if each collective is a ring; broadcasts (a few numbers) are left out."""
        sent: dict[str, float] = {}
        for (kind, ranks), n_bytes in self.bytes_of.items():
            if kind in RING_FACTORS:
                sent[kind] = sent.get(kind, 0.0) + ring_bytes(kind, n_bytes, ranks)
        return sent


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _ranks(args: Any) -> int:
    """Ranks of the group among a collective's arguments: an object, or its name as the last one."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(dist.ProcessGroup.unbox(value).size())
    return int(_resolve_process_group(args[-1]).size())
