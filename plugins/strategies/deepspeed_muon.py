"""Tells Muon where the matrices lie in DeepSpeed's flat fp32 partitions.

Stages 1 and 2 flatten a whole group and cut it into equal parts: most matrices lie in one part, at most one is cut by
each boundary. Stage 3 cuts every parameter, so all are. Written against deepspeed 0.19.8 (pinned).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lm.errors import ConfigError
from lm.optim.muon import MuonAdamW, Piece
from plugins.strategies import collectives
from plugins.strategies.deepspeed_state import flat_groups, is_stage_3
from plugins.strategies.state import shape_of


def link(zero: Any) -> None:
    """Give the engine's optimizer the layout of its partitions; nothing to do for another optimizer than MuonAdamW.

    DeepSpeed's own Muon works on its own terms (it needs its own optimizer class and a tag on every parameter); this
    one sees the same averaged and clipped gradients as under every other strategy.

    Raises:
        ConfigError: the partitions are on the CPU and the processes can only exchange what is on their devices.
    """
    if not isinstance(zero.optimizer, MuonAdamW):
        return
    if flat_groups(zero)[0][1].device.type == "cpu" and dist.get_backend() == "nccl":
        raise ConfigError("optim.name muon does not work with offload_optimizer under nccl; turn offload_optimizer off")
    pieces: dict[Tensor, list[Piece]] = {}
    for index, (parameters, flat) in enumerate(flat_groups(zero)):
        if zero.optimizer.param_groups[_group_of(zero, index)]["optimizer"] == "muon":
            pieces[flat] = _stage_3_pieces(parameters) if is_stage_3(zero) else _pieces(zero, index)
    zero.optimizer.flat_pieces = pieces.get


def _group_of(zero: Any, index: int) -> int:
    return int(zero.sub_group_to_group_id[index]) if is_stage_3(zero) else index


def _pieces(zero: Any, index: int) -> list[Piece]:
    """Stages 1 and 2: this rank has [begin, begin + size) of the flattened group."""
    size = int(zero.partition_size[index])
    begin = size * collectives.rank()
    offsets = zero.round_robin_bit16_offsets[index]
    return [
        _overlap(tuple(shape_of(parameter)), int(offset), begin, size)
        for parameter, offset in zip(zero.round_robin_bit16_groups[index], offsets, strict=True)
    ]


def _overlap(shape: tuple[int, ...], offset: int, begin: int, size: int) -> Piece:
    """The piece of a matrix at `offset` of the flattened group that lies in the part [begin, begin + size)."""
    numel = shape[0] * shape[1]
    first, last = max(offset, begin), min(offset + numel, begin + size)
    length = max(last - first, 0)
    is_cut = offset // size != (offset + numel - 1) // size
    if length == 0:
        return Piece((shape[0], shape[1]), 0, 0, 0, is_cut)
    return Piece((shape[0], shape[1]), first - begin, first - offset, length, is_cut)


def _stage_3_pieces(parameters: list[Any]) -> list[Piece]:
    """Stage 3: each parameter is cut into equal parts, the last padded; a rank's parts lie one after the other."""
    pieces, flat_start = [], 0
    for parameter in parameters:
        rows, cols = shape_of(parameter)
        part = int(parameter.partition_numel())
        start = min(part * collectives.rank(), rows * cols)
        length = min(part, rows * cols - start)
        pieces.append(Piece((rows, cols), flat_start, start, length, is_cut=part < rows * cols))
        flat_start += part
    return pieces
