"""Checksums of what several ranks must hold alike, exact on bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from plugins.strategies import state
from plugins.strategies.parts import copies, local, optimizer_parts, torch_optimizer, zero_optimizer

_CPU_WORDS, _WORDS = 1 << 16, 1 << 22  # of a tensor, taken at once: half a megabyte of weights stays in a CPU's cache
_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def checksum(tensor: Tensor) -> Tensor:
    """sum over i of word_i w_i mod 2^64, 0-dimensional int64 on the tensor's device.

    Words are the tensor's bits, 32 at a time (16-bit and 8-bit types: their size); each w_i is an odd pseudo-random
    number that depends on the position. A word that changed by 2^b changes the sum by 2^b w_i, which is never 0 mod
    2^64; changes in several words, swapped words among them, cancel with a chance of about 2^-32. Integer sums do not
    depend on the order of addition.
    """
    words = tensor.detach().contiguous().reshape(-1)
    words = words.view(_WORD_TYPES[words.element_size()])
    size = _CPU_WORDS if tensor.device.type == "cpu" else _WORDS
    weights = _weights(size, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index, chunk in enumerate(words.split(size)):
        total += (chunk.to(torch.int64) * weights[: chunk.numel()]).sum() * _odd(index)
    return total


@lru_cache(maxsize=2)
def _weights(size: int, device: torch.device) -> Tensor:
    """[size] odd int64, the same on every rank."""
    generator = torch.Generator().manual_seed(0x5CA1E)
    low, high = -(2**63), 2**63 - 1
    return (torch.randint(low, high, (size,), generator=generator, dtype=torch.int64) | 1).to(device)


def _odd(index: int) -> int:
    """An odd 64-bit number (splitmix64: Steele, Lea and Flood 2014), as a signed one."""
    z = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z = (z ^ z >> 31) | 1
    return z - 2**64 if z >= 2**63 else z


def replicated(strategy: Any) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """(key, this rank's tensor, place) of all that some other rank must hold too, in the same order on all ranks.

    Ranks whose places are equal hold the same piece. Keys are those of a checkpoint. Under ddp: weights and optimizer
    state; hsdp: the same pieces in each copy of the model; fsdp: nothing but scalars; zero1, zero2: weights; zero3:
    the small weights that every rank keeps; under all of them buffers. Call it between steps.
    """
    reshard = getattr(strategy, "_reshard", None)
    if reshard is not None:
        reshard()  # after a forward pass without backward the root's parameters are still gathered
    module = strategy.lightning_module
    tensors: dict[str, Tensor] = {}
    tensors.update({f"param/{name}": parameter for name, parameter in state.named_parameters(module).items()})
    tensors.update({f"buffer/{name}": buffer for name, buffer in state.persistent_buffers(module).items()})
    if zero_optimizer(strategy) is None:
        tensors.update(_optimizer_state(module, strategy))
    for key, tensor in tensors.items():
        if copies(tensor) > 1 and _is_whole(tensor):
            yield key, local(tensor), _place(tensor)


def published(strategy: Any) -> Iterator[tuple[list, Tensor, Tensor]]:
    """ZeRO: (parts, this rank's fp32 partition, the same weights as it gave them to the others), equal between steps.

    Under the other strategies there is one copy on a rank.
    """
    zero = zero_optimizer(strategy)
    if zero is None:
        return
    from plugins.strategies import collectives
    from plugins.strategies.deepspeed_state import is_stage_3

    for index, (flat, parts) in enumerate(optimizer_parts(strategy).items()):
        if is_stage_3(zero):
            given = zero.fp16_partitioned_groups_flat[index]
        else:
            given = zero.parallel_partitioned_bit16_groups[index][collectives.rank()]
        if given is not None and given.dtype == flat.dtype and given.device == flat.device:
            yield parts, flat.detach(), given.detach()


def _optimizer_state(module: Any, strategy: Any) -> Iterator[tuple[str, Tensor]]:
    optimizer = torch_optimizer(strategy)
    for name, parameter in state.named_parameters(module).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"optim/{name}/{key}", value if isinstance(value, Tensor) else torch.tensor(value)


def _is_whole(tensor: Any) -> bool:
    """False for what ZeRO-3 has cut."""
    return not hasattr(tensor, "ds_numel") or tensor.numel() == tensor.ds_numel


def _place(tensor: Tensor) -> tuple[int, ...]:
    """Which piece of a DTensor this rank has; () for what is whole."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_local_rank(dim)
        for dim, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    )
