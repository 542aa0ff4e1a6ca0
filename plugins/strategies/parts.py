"""Which named parameter lies where in the tensors that this rank's optimizer updates, and in its gradients.

Ordinary parameters and DTensors are one part each. DeepSpeed's optimizer works on flat partitions, in which pieces of
several parameters lie side by side (written against deepspeed 0.19.8, pinned).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from plugins.strategies import collectives, state


@dataclass(frozen=True)
class Part:
    """A piece of a parameter inside a tensor.

    Attributes:
        name: of the parameter, as in checkpoints.
        start, length: where the piece lies in the flattened local tensor.
        copies: ranks that hold the same piece: the share of each in a sum over ranks is 1 / copies.
    """

    name: str
    start: int
    length: int
    copies: int = 1


Parts = dict[Tensor, list[Part]]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; detached."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zero_optimizer(strategy: Any) -> Any | None:
    """DeepSpeed's partitioning optimizer, under ZeRO in training."""
    find = getattr(strategy, "_zero_optimizer", None)
    return None if find is None else find()


def torch_optimizer(strategy: Any) -> torch.optim.Optimizer:
    """The optimizer whose step changes weights: the strategy's own, or the one inside DeepSpeed's."""
    zero = zero_optimizer(strategy)
    return strategy.optimizers[0] if zero is None else zero.optimizer


def optimizer_parts(strategy: Any) -> Parts:
    """Parts of each tensor that torch_optimizer(strategy) updates, on this rank. After strategy.setup, and not while
    parameters are gathered."""
    zero = zero_optimizer(strategy)
    if zero is not None:
        return _zero_parts(strategy.lightning_module, zero)
    return {
        parameter: [Part(name, 0, local(parameter).numel(), copies(parameter))]
        for name, parameter in state.named_parameters(strategy.lightning_module).items()
    }


def gradient_parts(strategy: Any, parts: Parts) -> list[tuple[Part, Tensor]]:
    """(part, its gradient on this rank, flat) after the backward pass of the last micro-batch, before clipping.

    Args:
        parts: from optimizer_parts.
    """
    zero = zero_optimizer(strategy)
    if zero is None:
        return [
            (part, local(parameter.grad).flatten())
            for parameter, (part,) in parts.items()
            if parameter.grad is not None
        ]
    found: list[tuple[Part, Tensor]] = []
    for index, own in enumerate(parts.values()):
        found.extend(_slices(own, _zero_gradients(zero, index)))
    return found


def copies(parameter: Tensor) -> int:
    """Ranks that hold the same piece as this one."""
    if not isinstance(parameter, DTensor):
        return collectives.world_size()
    count = collectives.world_size() // parameter.device_mesh.size()
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        count *= size if isinstance(placement, Replicate) else 1
    return count


def _zero_parts(module: Any, zero: Any) -> Parts:
    """In the order of DeepSpeed's groups, stage 3: sub-groups."""
    from plugins.strategies.deepspeed_state import flat_groups, is_stage_3

    names = {id(parameter): name for name, parameter in state.named_parameters(module).items()}
    parts: Parts = {}
    for index, (parameters, flat) in enumerate(flat_groups(zero)):
        if is_stage_3(zero):
            parts[flat] = _stage_3_parts(parameters, names)
        else:
            parts[flat] = _flat_parts(zero, index, names)
    return parts


def _flat_parts(zero: Any, index: int, names: dict[int, str]) -> list[Part]:
    """Stages 1 and 2: this rank has [begin, begin + size) of the flattened group."""
    size = int(zero.partition_size[index])
    begin = size * collectives.rank()
    parts = []
    for parameter, offset in zip(
        zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index], strict=True
    ):
        first, last = max(int(offset), begin), min(int(offset) + parameter.numel(), begin + size)
        if first < last:
            parts.append(Part(names[id(parameter)], first - begin, last - first))
    return parts


def _stage_3_parts(parameters: list[Any], names: dict[int, str]) -> list[Part]:
    """Stage 3: each parameter is cut into equal parts, the last padded; a rank's parts lie one after the other."""
    parts, start = [], 0
    for parameter in parameters:
        size, whole = int(parameter.partition_numel()), state.shape_of(parameter).numel()
        length = max(min(size, whole - size * collectives.rank()), 0)
        parts.append(Part(names[id(parameter)], start, length))
        start += size
    return parts


def _zero_gradients(zero: Any, index: int) -> Iterable[Tensor]:
    """Tensors that one after the other are the gradient of a flat partition."""
    from plugins.strategies.deepspeed_state import flat_groups

    tensors = zero.averaged_gradients.get(index)
    if tensors is not None:
        return tensors
    grad = flat_groups(zero)[index][1].grad  # an offloaded optimizer
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # DeepSpeed copies gradients to the CPU without waiting
    return [] if grad is None else [grad]


def _slices(parts: list[Part], tensors: Iterable[Tensor]) -> list[tuple[Part, Tensor]]:
    """What of the tensors, laid end to end, belongs to each part; a part may be cut by the end of a tensor."""
    found, begin = [], 0
    for tensor in tensors:
        flat = tensor.detach().flatten()
        for part in parts:
            first, last = max(part.start, begin), min(part.start + part.length, begin + flat.numel())
            if first < last:
                found.append((part, flat[first - begin : last - begin]))
        begin += flat.numel()
    return found
