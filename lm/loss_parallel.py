"""The loss when the head's rows, one an id of the vocabulary, lie on several devices (tensor parallelism).

Letters as in lm.loss; U is the number of ids this device holds.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lm.loss import CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS, IGNORE, chunks, head_dtype, head_logits


def parallel_token_nll(
    x: Tensor, weight: DTensor, labels: Tensor, *, softcap: float | None = None, chunk_elements: int | None = None
) -> tuple[Tensor, Tensor]:
    """lm.loss.token_nll with a head cut by rows over a group of devices, all of which hold the same x and labels.

    Each device computes the logits of its own ids only. Two numbers a token are exchanged going forward, the gradient
    of x once going backward (Shoeybi et al. 2019, arXiv 1909.08053, sec. 3).

    Args:
        x: [B, T, D] final states, equal on all devices of the group.
        weight: [V, D] DTensor over one mesh dimension, Shard(0).
        labels: [B, T] int64, or IGNORE.
        softcap, chunk_elements: see lm.loss.token_nll.

    Returns:
        (nll, logsumexp), each [B, T] fp32, equal on all devices of the group.
    """
    mesh = weight.device_mesh
    (n_ids, _), (first_id, _) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    local = weight.to_local(grad_placements=(Shard(0),))
    if chunk_elements is None:
        chunk_elements = CPU_CHUNK_ELEMENTS if x.device.type == "cpu" else CHUNK_ELEMENTS
    rows = max(1, chunk_elements // max(1, n_ids))
    nll, logsumexp = _ParallelHeadLoss.apply(x, local, labels, softcap, rows, first_id, mesh.get_group())
    return nll, logsumexp


class _ParallelHeadLoss(torch.autograd.Function):
    """Arguments as of parallel_token_nll; weight is [U, D], this device's ids from first_id on."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        softcap: float | None,
        rows: int,
        first_id: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        dtype = head_dtype(x, weight)
        x_nD, labels_n = x.flatten(0, 1), labels.flatten()
        ids_n, mine_n = _local_ids(labels_n, first_id, len(weight))
        nll_BT, logsumexp_BT = (torch.empty(labels.shape, dtype=torch.float32, device=x.device) for _ in range(2))
        own_logsumexp, label_logit = logsumexp_BT.view(-1), nll_BT.view(-1)
        for chunk in chunks(len(x_nD), rows):
            logits = head_logits(x_nD[chunk], weight, dtype, softcap)
            own_logsumexp[chunk] = logits.logsumexp(dim=-1)
            label_logit[chunk] = logits.gather(1, ids_n[chunk, None]).squeeze(1)
        label_logit.masked_fill_(~mine_n, 0.0)
        dist.all_reduce(label_logit, group=group)
        _logsumexp_over(own_logsumexp, group)
        label_logit.neg_().add_(own_logsumexp).masked_fill_(labels_n == IGNORE, 0.0)  # now the loss
        ctx.save_for_backward(x, weight, labels, logsumexp_BT)
        ctx.softcap, ctx.rows, ctx.dtype, ctx.first_id, ctx.group = softcap, rows, dtype, first_id, group
        return nll_BT, logsumexp_BT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        """d nll / d logits = p - onehot(label), d logsumexp / d logits = p, on this device's ids."""
        x, weight, labels, logsumexp_BT = ctx.saved_tensors
        x_nD, labels_n, logsumexp = x.flatten(0, 1), labels.flatten(), logsumexp_BT.flatten()
        ids_n, mine_n = _local_ids(labels_n, ctx.first_id, len(weight))
        for_nll = grad_nll.flatten().masked_fill(labels_n == IGNORE, 0.0)
        for_both = for_nll + grad_logsumexp.flatten()
        for_label = for_nll.masked_fill(~mine_n, 0.0)
        head = weight.to(ctx.dtype)
        grad_x = torch.empty(x_nD.shape, dtype=torch.float32, device=x.device)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
        for chunk in chunks(len(x_nD), ctx.rows):
            logits = head_logits(x_nD[chunk], weight, ctx.dtype, ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square_()
            grad = logits.sub_(logsumexp[chunk, None]).exp_().mul_(for_both[chunk, None])
            grad.scatter_add_(1, ids_n[chunk, None], -for_label[chunk, None])
            if slope is not None:
                grad.mul_(slope)
            grad_dtype = grad.to(ctx.dtype)
            grad_x[chunk] = (grad_dtype @ head).float()
            grad_weight += (grad_dtype.T @ x_nD[chunk].to(ctx.dtype)).float()
        dist.all_reduce(grad_x, group=ctx.group)
        return grad_x.to(x.dtype).view(x.shape), grad_weight.to(weight.dtype), None, None, None, None, None


def _local_ids(labels: Tensor, first_id: int, n_ids: int) -> tuple[Tensor, Tensor]:
    """(row of each label in this device's part of the head, any row where it is elsewhere; whether it is here)."""
    rows = labels - first_id
    mine = (rows >= 0) & (rows < n_ids) & (labels != IGNORE)
    return rows.masked_fill(~mine, 0), mine


def _logsumexp_over(values: Tensor, group: dist.ProcessGroup) -> None:
    """log of the sum over devices of exp(values), in place."""
    largest = values.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    values.sub_(largest).exp_()
    dist.all_reduce(values, group=group)
    values.log_().add_(largest)
