"""Cross-entropy of next tokens, straight from the final states: the full table of logits is never held at once.

Letters: B batch, T positions, D width, V vocabulary, n tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # label of a position that predicts nothing (the last token of a document)

# Logits held at once, in fp32: 64 MB on a CPU; 1 GB elsewhere, since each chunk passes once over the head's gradient.
CPU_CHUNK_ELEMENTS = 1 << 24
CHUNK_ELEMENTS = 1 << 28


def token_nll(
    x: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None = None, chunk_elements: int | None = None
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of each label under softmax(x weight^T), and the softmax's logarithmic denominator.

    Tokens are taken a chunk at a time, forward and backward, so that memory beyond inputs, weight and their gradients
    is a few times `chunk_elements`. If all fit into one chunk their probabilities are kept for backward; else logits
    are computed again there, a third more work for the head.

    Args:
        x: [B, T, D] final states.
        weight: [V, D] of the head.
        labels: [B, T] int64, already shifted: labels[b, t] is the token after position t, or IGNORE.
        softcap: c in logits <- c tanh(logits / c) (Gemma 2, arXiv 2408.00118, sec. 2); None for none.
        chunk_elements: logits held at once; None chooses by device.

    Returns:
        (nll, logsumexp), each [B, T] fp32 in nats; nll is 0 where the label is IGNORE. Matrix products run in the
        dtype of autocast, if on; the softmax in fp32.
    """
    if chunk_elements is None:
        chunk_elements = CPU_CHUNK_ELEMENTS if x.device.type == "cpu" else CHUNK_ELEMENTS
    nll, logsumexp = _HeadLoss.apply(x, weight, labels, softcap, max(1, chunk_elements // weight.shape[0]))
    return nll, logsumexp


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """c tanh(logits / c); the logits themselves where there is no cap."""
    return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)


class _HeadLoss(torch.autograd.Function):
    """Arguments as of token_nll, `rows` being tokens a chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, rows: int
    ) -> tuple[Tensor, Tensor]:
        dtype = head_dtype(x, weight)
        x_nD, labels_n = x.flatten(0, 1), labels.flatten()
        # Not views of something flat: fully_shard hooks a model's outputs, and a view changed in place loses its hook.
        nll_BT, logsumexp_BT = (torch.empty(labels.shape, dtype=torch.float32, device=x.device) for _ in range(2))
        nll, logsumexp = nll_BT.view(-1), logsumexp_BT.view(-1)
        log_probs = x.new_empty(0)
        for chunk in chunks(len(x_nD), rows):
            logits = head_logits(x_nD[chunk], weight, dtype, softcap)
            first = logits[:, 0].clone()
            log_probs = torch.log_softmax(logits, dim=-1)
            logsumexp[chunk] = first - log_probs[:, 0]  # log_softmax does not return its denominator
            del logits  # before the next chunk asks for as much
            nll[chunk] = -log_probs.gather(1, labels_n[chunk].clamp(min=0)[:, None]).squeeze(1)
        nll.masked_fill_(labels_n == IGNORE, 0.0)
        kept = (log_probs,) if len(x_nD) <= rows and any(ctx.needs_input_grad) else ()
        ctx.save_for_backward(x, weight, labels, logsumexp_BT, *kept)
        ctx.softcap, ctx.rows, ctx.dtype = softcap, rows, dtype
        return nll_BT, logsumexp_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        """d nll / d logits = p - onehot(label), d logsumexp / d logits = p. Once only: what was kept is overwritten."""
        x, weight, labels, logsumexp_BT, *kept = ctx.saved_tensors
        x_nD, labels_n, logsumexp = x.flatten(0, 1), labels.flatten(), logsumexp_BT.flatten()
        for_nll = grad_nll.flatten().masked_fill(labels_n == IGNORE, 0.0)
        for_both = for_nll + grad_logsumexp.flatten()
        head = weight.to(ctx.dtype)
        grad_x = torch.empty_like(x_nD)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in chunks(len(x_nD), ctx.rows):
            denominator = logsumexp[chunk, None]
            grad = kept[0] if kept else head_logits(x_nD[chunk], weight, ctx.dtype, ctx.softcap).sub_(denominator)
            slope = None if ctx.softcap is None else 1 - ((grad + denominator) / ctx.softcap).square_()
            grad.exp_().mul_(for_both[chunk, None])
            grad.scatter_add_(1, labels_n[chunk].clamp(min=0)[:, None], -for_nll[chunk, None])
            if slope is not None:
                grad.mul_(slope)
            grad_dtype = grad.to(ctx.dtype)
            grad_x[chunk] = grad_dtype @ head
            if ctx.dtype == torch.float32:
                grad_weight.addmm_(grad_dtype.T, x_nD[chunk].to(ctx.dtype))  # no second [V, D] matrix
            else:
                grad_weight += grad_dtype.T @ x_nD[chunk].to(ctx.dtype)
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None, None, None


def head_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype of the head's matrix products: autocast's if it is on, else the weight's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def head_logits(x: Tensor, weight: Tensor, dtype: torch.dtype, softcap: float | None) -> Tensor:
    """[n, V] fp32."""
    return capped((x.to(dtype) @ weight.to(dtype).T).float(), softcap)


def chunks(n: int, rows: int) -> list[slice]:
    """Slices of at most `rows` that cover n."""
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]
