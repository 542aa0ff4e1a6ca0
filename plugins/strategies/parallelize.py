"""The one place that shards a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Cut a model's parameters over the devices of a mesh, in place (fully_shard: Zhao et al. 2023, arXiv 2304.11277).

    Each module in model.blocks is gathered for its own forward and backward; what is left (embedding, final norm,
    head) belongs to the root, so a matrix that embedding and head share stays one.

    Args:
        model: with a ModuleList `blocks`, on the meta device or with values.
        mesh: one dimension to shard over, or (replicate, shard) for HSDP.
        param_dtype: dtype in which parameters are gathered and used; None keeps theirs. The shards that the optimizer
            sees stay as they are (fp32).
        reduce_dtype: dtype in which gradients are averaged.
        reshard_after_forward: free a block's gathered parameters after forward and gather them again for backward;
            False trades memory for less communication.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        # Inputs keep their dtype: rotary tables handed to a block must not be rounded to bf16.
        cast_forward_inputs=False,
    )
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
