"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3): every matrix cut over a group of devices.

    attention    wq, wk, wv by heads (rows), wo by columns; each device computes its own heads
    mlp          w_gate, w_up by rows, w_down by columns
    embedding    by rows, that is by ids of the vocabulary; the head likewise (lm/loss_parallel.py)
    norms        whole on each device

One sum over the group after attention and one after the MLP, forward and backward alike; activations between them are
whole, and equal to the last bit, on all devices of the group.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lm.config import ModelConfig
from lm.errors import ConfigError


def tensor_parallelize(model: nn.Module, config: ModelConfig, mesh: DeviceMesh) -> None:
    """Cut a Llama's matrices over a one-dimensional mesh, in place; every parameter becomes a DTensor on it.

    Args:
        model: Llama, on the meta device.
        config: its shape.
        mesh: the tensor dimension.

    Raises:
        ConfigError: see check_divides; or blocks are compiled.
    """
    check_divides(config, mesh.size())
    if model.runtime.compile is True:  # type: ignore[union-attr]
        raise ConfigError(
            "model.runtime.compile true gives wrong gradients with tensor_parallel (torch 2.13 compiles DTensors so); "
            "set it to false"
        )
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, _block_plan(config))
    # Not by their modules' own forward alone: the loss reads the head's weight, and the embedding's when tied.
    root: dict[str, ParallelStyle] = {"embedding": RowwiseParallel(input_layouts=Replicate()), "norm": _Whole()}
    if not config.tie_embeddings:
        root["head"] = ColwiseParallel()
    parallelize_module(model, mesh, root)


def check_divides(config: ModelConfig, tensor_parallel: int) -> None:
    """Raise ConfigError, one line, where the model cannot be cut into `tensor_parallel` equal parts."""
    for name in ("n_heads", "n_kv_heads", "d_ff"):
        size = getattr(config, name)
        if size % tensor_parallel:
            raise ConfigError(
                f"model.config.{name} {size} does not divide by tensor_parallel {tensor_parallel}; change one of them"
            )
    if config.vocab_size < tensor_parallel:
        raise ConfigError(f"model.config.vocab_size {config.vocab_size} is below tensor_parallel {tensor_parallel}")


def _block_plan(config: ModelConfig) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {"attention_norm": _Whole(), "mlp_norm": _Whole()}
    for part, inward, outward in (("attention", ("wq", "wk", "wv"), "wo"), ("mlp", ("w_gate", "w_up"), "w_down")):
        plan[part] = _SharedInput()
        plan.update({f"{part}.{name}": ColwiseParallel() for name in inward})
        plan[f"{part}.{outward}"] = RowwiseParallel()
    if config.qk_norm:
        # [B, T, H, E] with this device's heads: the gain's gradient is a sum over the group.
        plan.update({f"attention.{name}": _Whole(Shard(2)) for name in ("q_norm", "k_norm")})
    return plan


class _Whole(ParallelStyle):
    """Parameters whole on each device; input and output are this device's plain tensors.

    Args:
        layout: how the input lies over the group; Replicate when it is the same on all devices.
    """

    def __init__(self, layout: Placement | None = None) -> None:
        super().__init__()
        self.layout = Replicate() if layout is None else layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, (self.layout,), run_check=False), *inputs[1:])

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class _SharedInput(ParallelStyle):
    """Hands the first input, whole on each device, to several row-cut matrices: their gradients are summed once."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any) -> Any:
            return (DTensor.from_local(inputs[0], device_mesh, (Replicate(),), run_check=False), *inputs[1:])

        module.register_forward_pre_hook(enter)
        return module
