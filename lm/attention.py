"""One door to attention: causal, grouped-query, and closed at document boundaries.

Letters: B batch, T positions, N = B T, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.errors import ConfigError

BACKENDS = ("auto", "sdpa", "documents", "flash", "flex")

# One call of the CPU kernel costs about as much as this many pairs of positions.
_CALL_PAIRS = 128 * 128
# The kernel skips what lies above the diagonal, unless it is given a mask.
_MASKED_COST = 2.0


@dataclass(frozen=True)
class Packing:
    """How the windows of a batch are cut into documents, in the form that the backend reads.

    Attributes:
        backend: sdpa, documents, flash or flex.
        mask: sdpa: [B, 1, T, T] bool, True where key j is not after query i and in its document; None is plain causal.
        lengths: documents: lengths of all documents in the batch, window after window; they sum to N.
        cumulative: flash: [documents + 1] int32, where each document begins in N, and N.
        block_mask: flex: its BlockMask.
    """

    backend: str
    mask: Tensor | None = None
    lengths: tuple[int, ...] = ()
    cumulative: Tensor | None = None
    block_mask: Any = None


def pack(document_ids: Tensor | None, shape: tuple[int, int], device: torch.device, backend: str = "auto") -> Packing:
    """Made once a forward, for all blocks. Reads document boundaries on the host: one wait for a CUDA device.

    Args:
        document_ids: [B, T] integers, equal within a document and different in its neighbours; None for one a window.
        shape: (B, T).
        device: of the activations.
        backend: one of BACKENDS. auto takes flash-attn on CUDA where it is installed, else FlexAttention for windows
            that hold boundaries; on a CPU it goes document by document where that is less work than a masked window.

    Raises:
        ConfigError: the backend is unknown, not installed or not for this device.
    """
    B, T = shape
    check_backend(backend, device.type, training=torch.is_grad_enabled())
    lengths = document_lengths(document_ids, B, T)
    if backend == "auto":
        backend = _choose(lengths, B, T, device.type)
    if backend == "flash":
        cumulative = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Packing("flash", cumulative=cumulative.to(device, non_blocking=True))
    if backend == "flex":
        return Packing("flex", block_mask=_block_mask(document_ids, B, T, device))
    if backend == "documents":
        return Packing("documents", lengths=lengths)
    return Packing("sdpa", mask=document_mask(document_ids) if len(lengths) > B else None)


def check_backend(backend: str, device_type: str, training: bool = True) -> None:
    """Raise ConfigError where this backend cannot run."""
    if backend not in BACKENDS:
        raise ConfigError(f"attention must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "flash" and device_type != "cuda":
        raise ConfigError(f"attention flash needs a CUDA device, this run is on {device_type}; use auto")
    if backend == "flex" and device_type == "cpu" and training:
        raise ConfigError("attention flex has no backward on a CPU; use auto")
    if backend == "flash" and find_spec("flash_attn") is None:
        raise ConfigError("attention flash needs flash-attn: pip install 'scalewright[flash]', or use auto")


def _choose(lengths: tuple[int, ...], B: int, T: int, device_type: str) -> str:
    packed = len(lengths) > B
    if device_type == "cuda":
        return "flash" if find_spec("flash_attn") is not None else "flex" if packed else "sdpa"
    pairs = sum(length * length for length in lengths) + _CALL_PAIRS * len(lengths)
    return "documents" if packed and pairs < _MASKED_COST * B * T * T else "sdpa"


def document_lengths(document_ids: Tensor | None, B: int, T: int) -> tuple[int, ...]:
    """Lengths of all documents of a batch, window after window; each window begins a new one."""
    if document_ids is None:
        return (T,) * B
    starts = torch.ones(B, T, dtype=torch.bool, device=document_ids.device)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    edges = [*starts.flatten().nonzero().flatten().tolist(), B * T]
    return tuple(after - before for before, after in pairwise(edges))


def document_mask(document_ids: Tensor | None) -> Tensor | None:
    """Which key each query may see in a packed window.

    Args:
        document_ids: as in `pack`, with no id used again in a window.

    Returns:
        [B, 1, T, T] bool; None for None. Every query sees itself: no row is empty.
    """
    if document_ids is None:
        return None
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return same.tril_().unsqueeze(1)


def attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, softcap: float | None = None) -> Tensor:
    """softmax(scale q k^T + mask) v.

    Args:
        q: [B, T, H, E].
        k, v: [B, T, K, E], H a multiple of K; query head h reads key-value head h // (H / K).
        packing: from `pack`.
        scale: factor on the scores.
        softcap: c in scores <- c tanh(scores / c), before the mask (Gemma 2, arXiv 2408.00118, sec. 2).

    Returns:
        [B, T, H * E] in q's dtype; the softmax runs in fp32 inside the kernel.
    """
    B, T, H, E = q.shape
    if packing.backend == "flash":
        out = _flash(q, k, v, packing.cumulative, scale, softcap)
    elif packing.backend == "flex":
        out = _flex(q, k, v, packing.block_mask, scale, softcap)
    elif packing.backend == "documents":
        out = _by_document(q, k, v, packing, scale, softcap)
    else:
        out = _dense(q, k, v, packing.mask, scale, softcap)
    return out.reshape(B, T, H * E)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        # The CPU kernel has no grouped heads; expanding is cheap beside the scores.
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if softcap is not None:
        return _explicit(q, k, v, mask, scale, softcap).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.transpose(1, 2)


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """No fused kernel caps scores: all [B, H, T, T] of them are held in fp32."""
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
    return scores.float().masked_fill(~mask, -torch.inf).softmax(-1).type_as(v) @ v


@torch.compiler.disable  # its loop is another one for each batch; handed the lengths, callers would compile anew too
def _by_document(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float, softcap: float | None) -> Tensor:
    """A window of n documents costs about a n-th of one document. [B, T, H, E] as [N, H, E], cut and joined again."""
    parts = (x.flatten(0, 1).split(packing.lengths) for x in (q, k, v))
    outs = [
        _dense(q_n[None], k_n[None], v_n[None], None, scale, softcap)[0] for q_n, k_n, v_n in zip(*parts, strict=True)
    ]
    return torch.cat(outs)


def _flash(q: Tensor, k: Tensor, v: Tensor, cumulative: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """FlashAttention 2 (Dao 2023, arXiv 2307.08691) over documents of different lengths; 16-bit inputs only."""
    from flash_attn import flash_attn_varlen_func

    T, dtype = q.shape[1], q.dtype
    half = dtype if dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
    q_n, k_n, v_n = (x.flatten(0, 1).to(half) for x in (q, k, v))
    # The longest document is bounded by the window: reading the true maximum would wait for the device.
    out = flash_attn_varlen_func(
        q_n, k_n, v_n, cumulative, cumulative, T, T, softmax_scale=scale, causal=True, softcap=softcap or 0.0
    )
    return out.to(dtype)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float, softcap: float | None) -> Tensor:
    """FlexAttention (Dong et al. 2024, arXiv 2412.05496); compiled on CUDA, plain elsewhere."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    kernel = _compiled_flex() if q.device.type == "cuda" else _plain_flex()
    grouped = q.shape[1] != k.shape[1]
    out = kernel(q, k, v, score_mod=_cap(softcap), block_mask=block_mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _plain_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    # Wrapped, so that selective checkpointing sees one operation and can keep its result.
    return torch.compile(_plain_flex(), dynamic=False, options={"wrap_inductor_compiled_regions": True})


@lru_cache(maxsize=4)  # the same function each time: another one would compile anew
def _cap(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def cap(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _block_mask(document_ids: Tensor | None, B: int, T: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    ids = torch.zeros(B, T, dtype=torch.int32, device=device) if document_ids is None else document_ids.to(device)

    def visible(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return (q_index >= k_index) & (ids[b, q_index] == ids[b, k_index])

    return create_block_mask(visible, B, None, T, T, device=device)
