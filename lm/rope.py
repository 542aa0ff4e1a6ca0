"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 15), half-split layout as in Hugging Face Llama."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=8)
def rope_table(length: int, d_head: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 .. length - 1.

    A pure function and no buffer: there is nothing to initialise after a meta-device build, nothing to save, and a
    changed base is never overwritten by an old checkpoint. Angles are computed in fp64: bf16 positions collapse
    above 256.

    Returns:
        (cos, sin), each [length, d_head / 2] fp32 on `device`.
    """
    frequencies = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies[None, :]
    return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + E/2) of the last dimension.

    Args:
        x: [B, T, H, E], any float dtype.
        cos, sin: [T, E / 2] fp32.

    Returns:
        [B, T, H, E] in x's dtype; the rotation is done in fp32.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
