"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 15), half-split layout as in Hugging Face Llama."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from lm.rope_scaling import RopeScaling


@lru_cache(maxsize=8)
def rope_table(
    length: int, d_head: int, theta: float, device: torch.device, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 .. length - 1.

    A pure function and no buffer: there is nothing to initialise after a meta-device build, nothing to save, and a
    changed base is never overwritten by an old checkpoint. Angles are computed in fp64: bf16 positions collapse
    above 256.

    Returns:
        (cos, sin), each [length, d_head / 2] fp32 on `device`, times the attention factor of YaRN.
    """
    # A table first made in validation would be an inference tensor, which training cannot keep for its backward pass.
    with torch.inference_mode(False):
        frequencies = rope_frequencies(length, d_head, theta, scaling)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies[None, :]
        factor = 1.0 if scaling is None else scaling.attention_scaling
        return (angles.cos() * factor).float().to(device), (angles.sin() * factor).float().to(device)


def rope_frequencies(length: int, d_head: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians a position for each pair, [d_head / 2] fp64; `length` counts for dynamic scaling only."""
    if scaling is None:
        return _plain(d_head, theta)
    if scaling.kind == "linear":
        return _plain(d_head, theta) / scaling.factor
    if scaling.kind == "dynamic":
        return _plain(d_head, _dynamic_base(length, d_head, theta, scaling))
    if scaling.kind == "yarn":
        return _yarn(d_head, theta, scaling)
    return _llama3(d_head, theta, scaling)


def _plain(d_head: int, theta: float) -> Tensor:
    return theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)


def _dynamic_base(length: int, d_head: int, theta: float, scaling: RopeScaling) -> float:
    """theta' = theta (s L / L0 - (s - 1))^(E / (E - 2)): the lowest frequency is interpolated, the highest stays."""
    longest = max(length, scaling.original_max_position)
    stretch = scaling.factor * longest / scaling.original_max_position - (scaling.factor - 1)
    return theta * stretch ** (d_head / (d_head - 2))


def _yarn(d_head: int, theta: float, scaling: RopeScaling) -> Tensor:
    """arXiv 2309.00071, sec. 3.2, the ramp over pair indices, its ends rounded outwards."""

    def pair_of(turns: float) -> float:
        """Which pair makes this many turns in original_max_position positions."""
        return d_head * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), d_head - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(d_head // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    plain = _plain(d_head, theta)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


def _llama3(d_head: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Plain where a wavelength fits high_freq_factor times into the original context, divided by factor where it fits
    less than low_freq_factor times, and blended linearly in that count between the two."""
    plain = _plain(d_head, theta)
    fits = scaling.original_max_position * plain / (2 * math.pi)
    kept = (fits - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + E/2) of the last dimension.

    Args:
        x: [B, T, H, E], any float dtype.
        cos, sin: [T, E / 2] or [B, T, E / 2] fp32.

    Returns:
        [B, T, H, E] in x's dtype; the rotation is done in fp32.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
