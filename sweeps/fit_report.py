"""A fit as text and as plain values for JSON. No fitting here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm.columns import aligned
from lm.data.files import plain
from sweeps.scaling.analysis import NOTE, Analysis, Decision, Result
from sweeps.scaling.bootstrap import Interval
from sweeps.scaling.decided import decided, second_opinion

MAX_EXCLUDED_LINES = 12


@dataclass(frozen=True)
class FitReport:
    """What `fit_experiment` hands back.

    Attributes:
        source: where the runs came from, as given.
        analysis: fits, intervals, holdout errors, decisions, verdict.
        bootstrap: replicates asked for.
        mlflow_run_ids: by approach, when the fit was logged.
    """

    source: str
    analysis: Analysis
    bootstrap: int
    mlflow_run_ids: dict[str, str]

    @property
    def best(self) -> Result:
        """The preferred approach's result."""
        return self.analysis.best

    def text(self) -> str:
        """The short table the command prints."""
        return "\n".join(
            [*_head(self), "", *_exponents(self), "", *_decisions(self), *_convention_lines(self), *_notes(self)]
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; NaN becomes None."""
        analysis = self.analysis
        table = analysis.table
        return plain(
            {
                "source": self.source,
                "n_runs": len(table),
                "budgets_flops": [float(b) for b in table.budgets] if len(table) else [],
                "flops_convention": table.convention,
                "n_convention": table.n_convention,
                "bootstrap": self.bootstrap,
                "results": {name: result_dict(result) for name, result in analysis.results.items()},
                "refused": analysis.refused,
                "preferred": analysis.best.approach if analysis.results else None,
                "decided": [_decision_dict(d) for d in decided(analysis)] if analysis.results else [],
                "minima": [
                    {"budget": m.budget, "n_opt": m.n_opt, "d_opt": m.d_opt, "loss": m.loss, "refused": m.reason}
                    for m in analysis.minima
                ],
                "excluded": [{"run": e.run, "reason": e.reason} for e in table.excluded],
                "conventions": [vars(c) for c in analysis.conventions],
                "verdict": analysis.verdict,
                "note": NOTE,
            }
        )


def result_dict(result: Result) -> dict[str, Any]:
    """One approach's numbers, nested."""
    last = result.holdout.last
    return {
        "a": result.a,
        "a_interval": _ends(result.a_interval),
        "b": result.b,
        "b_interval": _ends(result.b_interval),
        "e": result.e,
        "e_interval": _ends(result.e_interval),
        "parameters": result.model.parameters,
        "scheme": result.replicates.scheme if result.replicates else None,
        "bias": vars(result.bias) if result.bias else None,
        "holdout_error": last.error if last else None,
        "holdout": [vars(point) for point in result.holdout.points],
        "decisions": [_decision_dict(d) for d in result.decisions],
        "flags": list(result.flags),
    }


def _decision_dict(decision: Decision) -> dict[str, Any]:
    return {
        "budget": decision.budget,
        "n_opt": decision.n_opt,
        "n_interval": _ends(decision.n_interval),
        "d_opt": decision.d_opt,
        "d_interval": _ends(decision.d_interval),
        "loss": decision.loss,
        "loss_interval": _ends(decision.loss_interval),
        "holdout_error_at_budget": decision.holdout_error,
        "lr": decision.lr,
        "lr_interval": _ends(decision.lr_interval),
        "batch_tokens": decision.batch_tokens,
        "batch_interval": _ends(decision.batch_interval),
    }


def _ends(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


# Text


def quantity(value: float, digits: int = 3) -> str:
    """143,000 -> 143k; 2.35e9 -> 2.35B: as parameters and tokens are spoken of."""
    if not math.isfinite(value):
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{digits}g}{letter}" if value < 999.5 * size else f"{value / size:.0f}{letter}"
    return f"{value:.{digits}g}"


def _span(interval: Interval, show: Any) -> str:
    return "" if math.isnan(interval.low) else f" [{show(interval.low)}, {show(interval.high)}]"


def _head(report: FitReport) -> list[str]:
    table = report.analysis.table
    if not len(table):
        return [f"{report.source}: no usable runs"]
    budgets = table.budgets
    many = f"{len(budgets)} budgets" if all(run.budget is not None for run in table.runs) else "no budget column,"
    grid = f"{many} from {budgets.min():.3g} to {budgets.max():.3g} FLOPs"
    return [
        f"{report.source}: {len(table)} runs, {grid}",
        f"FLOPs counted as: {table.convention}; N as: {table.n_convention}; intervals are 95%. {NOTE}",
    ]


def _exponents(report: FitReport) -> list[str]:
    rows = [("approach", "a (N* ~ C^a)", "bias of a", "b (D* ~ C^b)", "E, nats", "holdout error")]
    for name, r in report.analysis.results.items():
        last = r.holdout.last
        rows.append(
            (
                name,
                f"{r.a:.3f}{_span(r.a_interval, lambda v: f'{v:.3f}')}",
                f"{r.bias.a:+.3f}" if r.bias else "-",
                f"{r.b:.3f}{_span(r.b_interval, lambda v: f'{v:.3f}')}",
                f"{r.e:.3f}{_span(r.e_interval, lambda v: f'{v:.3f}')}" if r.e else "not in the form",
                f"{last.error:+.2%}" if last else "-",
            )
        )
    return [_table(rows)] + [f"{name} refused: {why}" for name, why in report.analysis.refused.items()]


def _decisions(report: FitReport) -> list[str]:
    rows: list[tuple[str, ...]] = [("budget", "approach", "N*", "D*", "tokens/param", "loss at the optimum")]
    for name, result in report.analysis.results.items():
        rows += [_decision_row(name, d) for d in result.decisions]
    if len(rows) == 1:
        return []
    rows += [_decision_row("to act on", d) for d in decided(report.analysis)]
    other = second_opinion(report.analysis, report.best)
    also = f"; the size also by {other.approach}, which reads it off the measured minima" if other else ""
    return [
        _table(rows),
        f"to act on: {report.best.approach}, preferred for its holdout error{also}",
        *_rates(report),
    ]


def _decision_row(name: str, d: Decision) -> tuple[str, ...]:
    return (
        f"{d.budget:.3g}",
        name,
        quantity(d.n_opt) + _span(d.n_interval, quantity),
        quantity(d.d_opt) + _span(d.d_interval, quantity),
        f"{d.d_opt / d.n_opt:.1f}",
        f"{d.loss:.3f}{_span(d.loss_interval, lambda v: f'{v:.3f}')}",
    )


def _rates(report: FitReport) -> list[str]:
    """Learning rate and batch at each decision, where the table has the columns."""
    rows = [("budget", "approach", "learning rate", "batch, tokens")]
    for name, result in report.analysis.results.items():
        rows += [
            (
                f"{d.budget:.3g}",
                name,
                f"{d.lr:.3g}{_span(d.lr_interval, lambda v: f'{v:.3g}')}",
                quantity(d.batch_tokens) + _span(d.batch_interval, quantity),
            )
            for d in result.decisions
            if math.isfinite(d.lr)
        ]
    return ["", _table(rows)] if len(rows) > 1 else []


def _convention_lines(report: FitReport) -> list[str]:
    """The exponent under every convention the columns allow."""
    found = report.analysis.conventions
    if not found:
        return []
    rows = [("FLOPs as", "N as", "approach", "a (N* ~ C^a)")]
    rows += [
        (
            c.flops,
            c.n,
            c.approach + ("*" if c.limit else ""),
            f"{c.a:.3f}{_span(Interval(c.low, c.high), lambda v: f'{v:.3f}')}",
        )
        for c in found
    ]
    limits = dict.fromkeys(c.limit for c in found if c.limit)
    return ["", _table(rows), *(f"* no answer, only what counting does to it: {limit}" for limit in limits)]


def _notes(report: FitReport) -> list[str]:
    lines = [f"{name}: {flag}" for name, result in report.analysis.results.items() for flag in result.flags]
    lines = grouped(lines)
    lines += [_bias_line(name, result) for name, result in report.analysis.results.items() if result.bias]
    excluded = report.analysis.table.excluded
    if excluded:
        lines.append(f"excluded {len(excluded)} rows:")
        lines += [f"  {e.run}: {e.reason}" for e in excluded[:MAX_EXCLUDED_LINES]]
        if len(excluded) > MAX_EXCLUDED_LINES:
            lines.append(f"  and {len(excluded) - MAX_EXCLUDED_LINES} more (--json lists all)")
    return ["", *lines, f"verdict: {report.analysis.verdict}"]


def _bias_line(name: str, result: Result) -> str:
    """What approach 2's values need taken off on this grid; its intervals have it taken off."""
    bias = result.bias
    assert bias is not None
    return (
        f"{name}: without any noise this grid gives a {bias.a:+.3f}, N* {bias.n_opt:+.1%} and D* {bias.d_opt:+.1%} at "
        f"{bias.target:.3g} FLOPs off the surface fitted to it; values stand as fitted, intervals are without that bias"
    )


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    return aligned(rows, text_columns=None)


def grouped(lines: Sequence[str], few: int = 2) -> list[str]:
    """Lines that differ in their numbers only, beyond the first few, become one: `and 37 more like it`."""
    kinds: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        kinds.setdefault(re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", line), []).append(line)
    shown = []
    for same in kinds.values():
        shown += same if len(same) <= few + 1 else [*same[:few], f"… and {len(same) - few} more like the line above"]
    return shown
