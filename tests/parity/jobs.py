"""What the processes of a test do; each function runs on every rank and returns plain values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lm.hf_weights import HFWeights
from lm.init import materialize
from lm.model import Llama
from plugins.strategies.parallelize import parallelize
from tests.distributed.scenario import quiet


def fit(config: dict[str, Any]) -> dict[str, float]:
    """The recipe's own run of a config; its newest metrics."""
    from recipes.build import build

    quiet()
    parts = build(config)
    parts.trainer.fit(parts.module, parts.data)
    return parts.module.metrics


class Counting(HFWeights):
    """Counts the elements it reads."""

    read = 0

    def _read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        tensor = super()._read(name, part)
        self.read += tensor.numel()
        return tensor


def start_sharded(folder: Path) -> dict[str, tuple[bool, int, int]]:
    """By layout: did every rank get its part of the folder, elements it read, elements it holds. 4 processes."""
    dist.init_process_group("gloo")
    weights = Counting(folder)
    with torch.device("meta"):
        whole, by_rank = Llama(weights.config), Llama(weights.config)
    materialize(whole, weights.config, 0, "cpu", weights)
    expected = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    results = {}

    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parallelize(by_rank, flat)
    weights.read = 0
    materialize(by_rank, weights.config, 0, "cpu", weights)
    parameters = dict(by_rank.named_parameters())
    same = all(torch.equal(parameters[name].full_tensor(), expected[name]) for name in expected)
    results["fsdp 4"] = (same, weights.read, sum(p.to_local().numel() for p in parameters.values()))

    layouts = {
        "replicated": [Replicate(), Shard(0)],
        "rows and columns": [Shard(0), Shard(1)],
        "rows of rows": [Shard(0), Shard(0)],
        "interleaved": [_StridedShard(0, split_factor=2), Shard(0)],
    }
    for layout, placements in layouts.items():
        same, weights.read, held = True, 0, 0
        for name in ("embedding.weight", "blocks.1.mlp.w_up.weight"):
            empty = torch.full_like(expected[name], math.nan)
            parameter = distribute_tensor(empty, square, placements, src_data_rank=None)
            weights.fill(name, parameter)
            same &= torch.equal(parameter.full_tensor(), expected[name])
            held += parameter.to_local().numel()
        results[layout] = (same, weights.read, held)
    return results
