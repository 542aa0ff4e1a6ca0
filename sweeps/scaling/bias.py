"""Approach 2's bias on the user's own grid."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bias:
    """How far a fit misses a known answer without any noise, on the same design.

    Attributes:
        target: FLOPs of n_opt and d_opt.
        a: fitted exponent of N* minus the surface's.
        n_opt, d_opt: relative errors of N* and D* at the target.
        loss: relative error of the loss at the optimum there.
    """

    target: float
    a: float
    n_opt: float
    d_opt: float
    loss: float
