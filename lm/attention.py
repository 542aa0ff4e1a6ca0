"""One door to attention: causal, grouped-query, and closed at document boundaries.

Letters: B batch, T positions, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def document_mask(document_ids: Tensor | None) -> Tensor | None:
    """Which key each query may see in a packed window.

    Args:
        document_ids: [B, T] integers, equal within a document and different in its neighbours; None for one document.

    Returns:
        [B, 1, T, T] bool, True where key j is not after query i and in i's document; None when no window holds a
        boundary, so that the plain causal kernel serves. Every query sees itself: no row is empty.
    """
    if document_ids is None or bool((document_ids[:, 0] == document_ids[:, -1]).all()):
        return None
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril_().unsqueeze(1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v.

    Args:
        q: [B, T, H, E].
        k, v: [B, T, K, E], H a multiple of K; query head h reads key-value head h // (H / K).
        mask: from document_mask; None is plain causal.
        scale: factor on the scores.

    Returns:
        [B, T, H * E] in q's dtype; the softmax runs in fp32 inside the kernel.
    """
    B, T, H, E = q.shape
    groups = H // k.shape[2]
    if groups > 1:
        # The CPU kernel has no grouped heads; expanding is cheap beside the scores.
        k = k.repeat_interleave(groups, dim=2)
        v = v.repeat_interleave(groups, dim=2)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return out.transpose(1, 2).reshape(B, T, H * E)
