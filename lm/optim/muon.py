"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for hidden matrices and AdamW for the rest, in one.

Muon's update of a matrix is its momentum with all singular values brought near 1 by a Newton-Schulz iteration. That
needs the whole matrix, while momentum, decay and the update itself go element by element. So a matrix that is cut over
processes is put together for the iteration alone, and each process keeps its own piece of the result:

- plain tensors: nothing to do; torch's Newton-Schulz iteration and update rule, bit for bit torch.optim.Muon in bf16.
- DTensor shards (fsdp, hsdp): gathered one matrix at a time.
- flat partitions (DeepSpeed ZeRO), in which pieces of several matrices lie side by side: `flat_pieces` says where;
  matrices that lie in one partition as a whole are not sent anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.optim.adam import adam

# a, b, c of x <- a x + b x^3 + c x^5, and the floor of the norm: as in torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def newton_schulz(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """U p(S) V^T for a matrix U S V^T, p the `steps`-fold quintic of COEFFICIENTS on S / ||S||: values near 1.

    Args:
        matrix: [rows, cols], whole.
        steps: 5 brings singular values from about .01 of the norm up into .7 to 1.2.
        dtype: of the matrix products; bfloat16 is torch's own function.

    Returns:
        [rows, cols] in the matrix's dtype.
    """
    if dtype == torch.bfloat16:
        return _zeropower_via_newtonschulz(matrix, COEFFICIENTS, steps, EPS).to(matrix.dtype)
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def update_scale(shape: Iterable[int], scaling: str) -> float:
    """Factor on the orthogonal update of a [rows, cols] matrix.

    match_rms_adamw: .2 sqrt(max(rows, cols)), so that its entries have the root mean square .2 that AdamW's have (Liu
    et al. 2025, arXiv 2502.16982, eq. 4). original: sqrt(max(1, rows / cols)).
    """
    rows, cols = shape
    return 0.2 * math.sqrt(max(rows, cols)) if scaling == "match_rms_adamw" else math.sqrt(max(1.0, rows / cols))


@dataclass(frozen=True)
class Piece:
    """Where a matrix lies in this process's flat partition.

    Attributes:
        shape: [rows, cols] of the whole matrix.
        flat_start: first element of the piece in the partition.
        start: that element's place in the whole, flattened matrix.
        length: elements of the piece; 0 where this process has none of it.
        is_cut: the matrix has pieces in more than one partition; the same on all processes.
    """

    shape: tuple[int, int]
    flat_start: int
    start: int
    length: int
    is_cut: bool


class MuonAdamW(torch.optim.AdamW):
    """AdamW (fused) for groups with `optimizer` 'adamw', Muon for those with 'muon'.

    A Muon group holds `lr`, `weight_decay`, `momentum`, `nesterov`, `ns_steps`, `scaling` and `ns_dtype` (a name of a
    torch dtype). With g the gradient: B <- mu B + (1 - mu) g, u = mu B + (1 - mu) g (Nesterov) or B,
    W <- (1 - lr weight_decay) W - lr update_scale NS(u). State: momentum_buffer, of the parameter's shape.

    Args:
        groups: parameter groups; a Muon group's parameters are matrices, or what a strategy makes of them.
        lr, betas, eps: defaults of the AdamW groups.

    Attributes:
        flat_pieces: gives the pieces in a flat partition, in the same order on all processes, or None for a parameter
            that is no flat partition. Set by strategies that flatten parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.flat_pieces: Callable[[Tensor], list[Piece] | None] = lambda parameter: None

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Past Adam's, which fills in what old versions did not save and expects a step count of every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all groups. Collective where Muon's parameters are cut over processes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["optimizer"] == "muon":
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._muon(parameter, group)
            else:
                self._adamw(group)
        return loss

    def _adamw(self, group: dict[str, Any]) -> None:
        """What torch.optim.AdamW.step does with one group."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        parameters, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = lists
        has_complex = self._init_group(group, *lists)
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs,
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=has_complex,
            decoupled_weight_decay=True,
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[parameter], parameter.grad
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        pieces = self.flat_pieces(parameter)
        if pieces is not None:
            for piece in pieces:
                _update_piece(parameter, direction, piece, group)
        elif isinstance(direction, DTensor):
            whole = _orthogonal(direction.full_tensor(), group)
            own = distribute_tensor(whole, direction.device_mesh, direction.placements, src_data_rank=None)
            # The parameter's device is not the mesh's when parameters are offloaded.
            parameter.add_(own.to(parameter.device), alpha=-_rate(direction.shape, group))
        else:
            parameter.add_(_orthogonal(direction, group), alpha=-_rate(direction.shape, group))


def _rate(shape: Iterable[int], group: dict[str, Any]) -> float:
    return group["lr"] * update_scale(shape, group["scaling"])


def _orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    return newton_schulz(matrix, group["ns_steps"], getattr(torch, group["ns_dtype"]))


def _update_piece(parameter: Tensor, direction: Tensor, piece: Piece, group: dict[str, Any]) -> None:
    """Update one matrix's piece of a flat partition. Collective where the matrix is cut."""
    own = direction[piece.flat_start : piece.flat_start + piece.length]
    whole = own
    if piece.is_cut:
        # The sum of pieces on zeros is exact, and pieces need not be of one size.
        whole = own.new_zeros(piece.shape[0] * piece.shape[1])
        whole[piece.start : piece.start + piece.length] = own
        dist.all_reduce(whole)
    if piece.length == 0:
        return
    update = _orthogonal(whole.view(piece.shape), group).flatten()[piece.start : piece.start + piece.length]
    target = parameter[piece.flat_start : piece.flat_start + piece.length]
    target.add_(update, alpha=-_rate(piece.shape, group))
