"""What `sweeps.next` prints: the proposal, and the comparison of simulated sweeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sweeps.fit_report import quantity
from sweeps.grid import Cell
from sweeps.scaling.next_simulation import Arm, compare
from sweeps.scaling.proposal import Base, Proposal
from sweeps.scaling.row_design import RowPlan

NAMES = {"size": "N*", "loss": "the loss at N*"}


def proposal_text(base: Base, proposal: Proposal, runs: Sequence[Cell] | None) -> str:
    """The cells, the holdout, the interval before and after."""
    target, cells = proposal.target_c, proposal.cells
    spent = float(base.table.c.sum())
    n_opt = base.n_opt(target)
    lines = [
        f"decision: {NAMES[proposal.decision]} at {target:.3g} FLOPs; N* is {quantity(n_opt)} by approach parametric",
        f"  95% interval {factor(proposal.before)}, expected {factor(proposal.after)} after these {len(cells)} cells"
        f" ({proposal.after / proposal.before:.0%} as wide in logs)",
        f"  they cost {proposal.flops:.3g} FLOPs; the {len(base.table)} runs there are cost {spent:.3g}",
        f"{'FLOPs':>10}{'N':>9}{'D':>9}{'D/N':>8}{'N/N*':>7}" + ("  width" if runs else ""),
    ]
    for i, (n, d, c) in enumerate(zip(cells.n, cells.d, cells.c, strict=True)):
        width = f"{runs[i].model.d_model:>7}" if runs else ""
        mark = "  holdout: forecast it before it runs" if i == proposal.holdout else ""
        lines.append(
            f"{c:>10.3g}{quantity(n):>9}{quantity(d):>9}{d / n:>8.1f}{n / base.n_opt(float(c)):>7.2f}{width}{mark}"
        )
    notes = [*base.fit.flags, *proposal.notes, "the expectation holds as far as the fitted form does"]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def rows_text(plan: RowPlan, target_c: float) -> str:
    """Rows for approach 2, the interval of N* before and after."""
    z = 1.96
    lines = [
        f"decision: N* at {target_c:.3g} FLOPs by approach isoflop, which needs whole rows of cells",
        f"  95% interval {factor(z * plan.before)}, expected {factor(z * plan.after)} after {len(plan.cells)} cells"
        f" ({plan.after / plan.before:.0%} as wide in logs), {plan.flops:.3g} FLOPs",
    ]
    for budget, count in plan.repeats.items():
        sizes = np.unique(plan.cells.n[np.isclose(plan.cells.c, budget, rtol=0.1)])
        named = ", ".join(quantity(n) for n in sizes)
        lines.append(f"  {budget:.3g} FLOPs once more with {count} new seed{'s' * (count > 1)}: N {named}")
    if plan.new_budget:
        sizes = np.unique(plan.cells.n[np.isclose(plan.cells.c, plan.new_budget, rtol=1e-9)])
        named = ", ".join(quantity(n) for n in sizes)
        lines.append(f"  new budget {plan.new_budget:.3g} FLOPs, {plan.seeds} seed{'s' * (plan.seeds > 1)}: N {named}")
    return "\n".join([*lines, "note: noise only; approach 2's bias on the grid is not made smaller by more cells"])


def factor(half_width: float) -> str:
    """Half-width in logs as spoken of: x/ 1.32, or +-1.2% where it is small."""
    if not math.isfinite(half_width):
        return "unknown"
    if half_width < 0.05:
        return f"+-{100 * half_width:.2g}%"
    return f"x/ {math.exp(half_width):.{3 if half_width < 0.2 else 2}f}"


def proposal_dict(base: Base, proposal: Proposal, runs: Sequence[Cell] | None) -> dict[str, Any]:
    """Plain values for JSON."""
    cells = proposal.cells
    rows = [
        {"n_params": float(n), "d_tokens": float(d), "c_flops": float(c), "holdout": i == proposal.holdout}
        | ({"d_model": runs[i].model.d_model, "budget_flops": runs[i].budget_flops} if runs else {})
        for i, (n, d, c) in enumerate(zip(cells.n, cells.d, cells.c, strict=True))
    ]
    before = None if math.isnan(proposal.before) else proposal.before
    return {
        "target_flops": proposal.target_c,
        "decision": proposal.decision,
        "n_opt": base.n_opt(proposal.target_c),
        "half_width_before": before,
        "half_width_after": None if before is None else proposal.after,
        "flops": proposal.flops,
        "cells": rows,
        "notes": [*base.fit.flags, *proposal.notes],
    }


def simulation_text(surface: str, arms: dict[str, Arm]) -> str:
    """One surface's table: every way on, and `next` over each of them."""
    head = f"{'':<9}{'cells':>6}{'FLOPs':>9}{'width':>8}{'RMSE':>8}{'bias':>8}{'covered':>9}"
    lines = [f"{surface}: {len(arms['next'].error)} sweeps; 95% interval of ln N* (median width), error of ln N*", head]
    for name, arm in arms.items():
        lines.append(
            f"{name:<9}{_mean(arm.cells):>6.0f}{_mean(arm.flops):>9.2g}{_median(arm.width):>8.3f}"
            f"{math.sqrt(_mean(arm.error**2)):>8.3f}{_mean(arm.error):>+8.3f}{_mean(arm.covered):>9.1%}" + _refused(arm)
        )
    for name in arms:
        if name in ("next", "start"):
            continue
        c = compare(arms["next"], arms[name])
        lines.append(
            f"next over {name:<8} width {c.width:.3f} [{c.width_low:.3f}, {c.width_high:.3f}]"
            f"   RMSE {c.rmse:.3f} [{c.rmse_low:.3f}, {c.rmse_high:.3f}]   ({c.sweeps} sweeps)"
        )
    expected, real = arms["next"].expected, arms["next"].width / arms["start"].width
    lines.append(f"next: width over start, expected {_median(expected):.2f}, came out {_median(real):.2f} (medians)")
    return "\n".join(lines)


def _refused(arm: Arm) -> str:
    count = int(np.isnan(arm.width).sum())
    return f"   {count} without an interval" if count else ""


def _mean(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _median(values: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan
