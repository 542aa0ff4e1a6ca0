"""The one place that shards a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from plugins.strategies.tensor_parallel import tensor_parallelize

TENSOR = "tensor"  # name of the mesh dimension that matrices are cut over


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> nn.Module:
    """Cut a model's parameters over the devices of a mesh, in place (fully_shard: Zhao et al. 2023, arXiv 2304.11277).

    With a tensor dimension, matrices are cut over it first, then what each device of it holds over the other ones.

    Each module in model.blocks is gathered for its own forward and backward; what is left (embedding, final norm,
    head) belongs to the root, so a matrix that embedding and head share stays one.

    Args:
        model: with a ModuleList `blocks`, on the meta device or with values; a Llama, with a tensor dimension.
        mesh: one dimension to shard over, or (replicate, shard) for HSDP; either followed by TENSOR.
        param_dtype: dtype in which parameters are gathered and used; None keeps theirs. The shards that the optimizer
            sees stay as they are (fp32).
        reduce_dtype: dtype in which gradients are averaged.
        reshard_after_forward: free a block's gathered parameters after forward and gather them again for backward;
            False trades memory for less communication.
        cpu_offload: keep shards in CPU memory and copy them to the device when they are gathered (CUDA only).
    """
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        # Inputs keep their dtype: rotary tables handed to a block must not be rounded to bf16.
        cast_forward_inputs=False,
    )
    names = mesh.mesh_dim_names or ()
    if TENSOR in names:
        tensor_parallelize(model, model.config, mesh[TENSOR])  # type: ignore[arg-type]
        mesh = mesh[tuple(name for name in names if name != TENSOR)]
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for block in model.get_submodule("blocks").children():
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward, offload_policy=offload
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model
