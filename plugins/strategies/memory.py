"""Bytes of parameters, gradients and optimizer state that this rank really holds, by walking its tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, strided
from torch.distributed.tensor import DTensor

from plugins.strategies.parts import zero_optimizer

KINDS = ("parameters", "gradients", "optimizer_state")


def held_bytes(strategy: Any) -> dict[str, int]:
    """{"parameters", "gradients", "optimizer_state", "other"} in bytes, on this rank.

    Call it between backward and the optimizer step, in on_before_optimizer_step, from the second step on: then all
    three exist. Memory is counted by storage, once each, padding included: views of one flat buffer count as the
    buffer. A DTensor counts as its local shard. DeepSpeed's fp32 copy of the parameters that the optimizer works on
    counts as parameters. `other` is every other tensor of the process: batch, activations still referred to, and
    communication buffers (DeepSpeed's have the size of its bucket, whether they are used or not).
    """
    seen: set[int] = set()
    held = {}
    for kind, tensors in zip(KINDS, (_parameters(strategy), _gradients(strategy), _state(strategy)), strict=True):
        held[kind] = _storage_bytes(tensors, seen)
    held["other"] = _storage_bytes(_all_tensors(), seen)
    return held


def _parameters(strategy: Any) -> Iterator[Tensor]:
    for parameter in strategy.lightning_module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):  # stage 3: this rank's part; .data is empty unless it is gathered
            yield parameter.ds_tensor
    zero = zero_optimizer(strategy)
    if zero is not None:
        from plugins.strategies.deepspeed_state import flat_groups

        for _, flat in flat_groups(zero):
            yield flat.data


def _gradients(strategy: Any) -> Iterator[Tensor]:
    for parameter in strategy.lightning_module.parameters():
        if parameter.grad is not None:
            yield parameter.grad
    zero = zero_optimizer(strategy)
    if zero is None:
        return
    from plugins.strategies.deepspeed_state import flat_groups

    for gradients in zero.averaged_gradients.values():
        yield from gradients or []
    for _, flat in flat_groups(zero):
        if flat.grad is not None:
            yield flat.grad


def _state(strategy: Any) -> Iterator[Tensor]:
    zero = zero_optimizer(strategy)
    for optimizer in strategy.optimizers if zero is None else [zero.optimizer]:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _all_tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]


def _storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages of these tensors that are not in `seen`, which they are added to."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta or local.layout is not strided:
            continue
        storage = local.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
