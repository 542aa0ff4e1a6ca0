"""FP8 matrix products inside the blocks, through torchao's float8 training; everything else as under bf16-mixed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lm.errors import ConfigError

_MULTIPLE = 16  # both sizes of a matrix, for the FP8 kernels
_MIN_CAPABILITY = (8, 9)


class Float8(MixedPrecision):
    """bf16-mixed whose blocks multiply in FP8 (Micikevicius et al. 2022, arXiv 2209.05433).

    The linear layers of the blocks scale weights and inputs to e4m3 and gradients to e5m2 or e4m3, as the recipe says,
    for each product anew. Embedding, head, norms, RoPE, softmax and loss stay as under bf16-mixed; parameters, their
    names, gradients, optimizer state and checkpoints are the fp32 ones of any other precision.

    Args:
        recipe: tensorwise (one scale a tensor, fastest), rowwise (one a row, more exact) or rowwise_with_gw_hp
            (rowwise, the weights' gradients in bf16).
        emulate: compute what FP8 would give with ordinary products: slow, runs anywhere, for tests.

    Raises:
        ConfigError: torchao is not installed; when the model is built: the GPU has no FP8, or a size does not divide.
    """

    label = "fp8"

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        emulate: bool = False,
    ) -> None:
        if find_spec("torchao") is None:
            raise ConfigError("precision fp8 needs torchao: pip install 'scalewright[fp8]'")
        super().__init__("bf16-mixed", "cuda")
        self.recipe, self.emulate = recipe, emulate

    def convert_model(self, model: nn.Module, device: torch.device) -> None:
        """Exchange the linear layers of model.blocks, in place, before they are sharded; on the meta device too.

        Args:
            device: on which the model will run.
        """
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        self.device = device.type  # of autocast
        blocks = model.get_submodule("blocks")
        self._check(blocks, device)
        config = Float8LinearConfig.from_recipe_name(self.recipe)
        if self.emulate:
            object.__setattr__(config, "emulate", True)  # a frozen dataclass whose recipes take no arguments
        convert_to_float8_training(blocks, config=config)
        if device.type == "cuda":
            return
        for layer in blocks.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(_as_autocast_would)

    def _check(self, blocks: nn.Module, device: torch.device) -> None:
        if not self.emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < _MIN_CAPABILITY):
            raise ConfigError(
                "precision fp8 needs a CUDA device of compute capability 8.9 or more (Ada, Hopper); use bf16-mixed"
            )
        for name, layer in blocks.named_modules():
            if isinstance(layer, nn.Linear) and any(size % _MULTIPLE for size in layer.weight.shape):
                name = re.sub(r"^\d+\.", "", name)
                raise ConfigError(
                    f"precision fp8 needs sizes that divide by {_MULTIPLE}, {name} is "
                    f"{' x '.join(str(size) for size in layer.weight.shape)}; change d_model, d_ff or the heads"
                )


def _as_autocast_would(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """torchao's layer asks only for CUDA's autocast."""
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    return tuple(x.to(torch.get_autocast_dtype("cpu")) for x in inputs)
