"""How large attention's scores get: the largest one of each head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lm.attention import Packing, document_mask

_QUERIES = 1024  # rows of scores held at once


def largest_scores(
    q: Tensor, k: Tensor, packing: Packing, scale: float, windows: Sequence[int] | None = None
) -> Tensor:
    """max over windows and over the pairs that attention sees of scale q.k, for each query head; [H] fp32.

    A score before any soft-cap. Costs about as much as the first half of attention, in fp32, and holds
    [H / K, 1024, T] scores at a time.

    Args:
        q: [B, T, H, E], as attention gets it.
        k: [B, T, K, E].
        packing: from lm.attention.pack.
        scale: factor on the scores.
        windows: the ones to look at; None for all B.
    """
    B, T, H, _ = q.shape
    K = k.shape[2]
    hidden = ~_visible(packing, B, T, q.device)
    largest = torch.full((K, H // K), -torch.inf, device=q.device)
    # Outside of dispatch modes: selective checkpointing would keep every product [H / K, T, T] for backward.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False), _disable_current_modes():
        for window, head in product(range(B) if windows is None else windows, range(K)):
            mask = hidden[window if len(hidden) > 1 else 0]
            group = q[window, :, head * (H // K) : (head + 1) * (H // K)].float().transpose(0, 1)  # [H / K, T, E]
            keys = k[window, :, head].float().T
            for first in range(0, T, _QUERIES):
                last = min(first + _QUERIES, T)
                scores = group[:, first:last] @ keys[:, :last] * scale
                scores.masked_fill_(mask[first:last, :last], -torch.inf)
                largest[head] = torch.maximum(largest[head], scores.amax(dim=(1, 2)))
    return largest.flatten()


def _visible(packing: Packing, B: int, T: int, device: torch.device) -> Tensor:
    """[B or 1, T, T] bool: which key each query sees."""
    if packing.backend == "flex":
        b, i = torch.arange(B, device=device), torch.arange(T, device=device)
        visible: Tensor = packing.block_mask.mask_mod(b[:, None, None], b[:1], i[:, None], i)
        return visible
    if packing.backend in ("documents", "flash"):
        lengths = torch.tensor(packing.lengths) if packing.cumulative is None else packing.cumulative.diff()
        documents = torch.arange(len(lengths), device=device)
        ids = torch.repeat_interleave(documents, lengths.to(device), output_size=B * T).view(B, T)  # known: no wait
        mask = document_mask(ids)
    else:
        mask = packing.mask
    return torch.ones(1, T, T, dtype=torch.bool, device=device).tril_() if mask is None else mask[:, 0]
