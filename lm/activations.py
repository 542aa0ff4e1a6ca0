"""What is kept between forward and backward: everything, block inputs only, or the results that are dear to compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Matrix products and attention; the rest of a block (norms, RoPE, SwiGLU's product) is cheap to compute again. By name:
# not every one exists on every machine.
_KEPT = frozenset(
    {
        "aten::mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_varlen_forward",
        "inductor_compiled_code",  # FlexAttention, the one function that is compiled inside a block (lm/attention.py)
    }
)


def run_block(block: nn.Module, kind: str, *inputs: Any) -> Tensor:
    """block(*inputs) with activation checkpointing (Chen et al. 2016, arXiv 1604.06174).

    Args:
        kind: none, full or selective; see RuntimeConfig.
    """
    if kind == "none" or not torch.is_grad_enabled():
        return block(*inputs)
    context: dict[str, Any] = (
        {} if kind == "full" else {"context_fn": partial(create_selective_checkpoint_contexts, _policy)}
    )
    # Nothing in a block is random, so the state of the random generators need not be kept.
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, **context)


def _policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Of a torch operator with its overload, or of a higher-order operator."""
    return CheckpointPolicy.MUST_SAVE if operation.name() in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
