"""Tables of the report as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from sweeps.fit_report import grouped, quantity
from sweeps.report_words import plain, power, span
from sweeps.scaling.analysis import Analysis
from sweeps.scaling.approaches import APPROACHES
from sweeps.scaling.bootstrap import Interval


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = True) -> str:
    """A table that scrolls by itself on a narrow screen; cells are escaped, the first column is the row's name."""
    head = "".join(f"<th scope=col>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>"
        + f"<th scope=row>{html.escape(row[0])}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def title_of(approach: str) -> str:
    """An approach as people call it."""
    return APPROACHES[approach].title if approach in APPROACHES else approach


def _with(value: str, ends: Interval, digits: int | None = None) -> str:
    return value if math.isnan(ends.low) else f"{value} ({span(ends, digits)})"


def decisions(analysis: Analysis) -> str:
    """A row for each budget and approach."""
    with_rates = any(math.isfinite(d.lr) for r in analysis.results.values() for d in r.decisions)
    rows = []
    for name, result in analysis.results.items():
        for d in result.decisions:
            row = [
                name, power(d.budget), _with(quantity(d.n_opt), d.n_interval), _with(quantity(d.d_opt), d.d_interval),
                f"{d.d_opt / d.n_opt:.3g}", _with(plain(d.loss, 3), d.loss_interval, 3),
            ]  # fmt: skip
            if with_rates:
                row += [f"{d.lr:.2e}" if math.isfinite(d.lr) else "–", quantity(d.batch_tokens)]
            rows.append(row)
    header = ["approach", "budget, FLOPs", "N* (95%)", "D* (95%)", "D*/N*", "loss (95%)"]
    return table(header + (["learning rate", "batch, tokens"] if with_rates else []), rows)


def fits(analysis: Analysis) -> str:
    """A row for each approach: exponents, irreducible loss, errors, bias on this grid."""
    with_bias = any(r.bias is not None for r in analysis.results.values())
    rows = []
    for name, r in analysis.results.items():
        last = r.holdout.last
        row = [
            f"{title_of(name)} ({name})", _with(f"{r.a:.3f}", r.a_interval, 3), _with(f"{r.b:.3f}", r.b_interval, 3),
            _with(f"{r.e:.3f}", r.e_interval, 3) if r.e else "not in the form",
            _error(last.error) if last else "–", r.replicates.scheme if r.replicates else "none",
        ]  # fmt: skip
        if with_bias:
            row.append(f"{r.bias.a:+.4f}; N* {r.bias.n_opt:+.1%}" if r.bias else "–")
        rows.append(row)
    header = ["approach", "a (95%)", "b (95%)", "E, nats (95%)", "holdout error", "resampling"]
    return table(header + (["bias on this grid: a; N*"] if with_bias else []), rows)


def refusals(analysis: Analysis) -> str:
    """Approaches that gave no answer and why, budgets whose curve has no minimum, flags; empty when all is well."""
    lines = [f"{name} gave no answer: {why}" for name, why in analysis.refused.items()]
    lines += [f"{name}: {flag}" for name, r in analysis.results.items() for flag in r.flags]
    if "isoflop" not in analysis.results:  # else they are its flags
        lines += [f"IsoFLOP curve at {power(m.budget)} FLOPs refused: {m.reason}" for m in analysis.minima if not m.ok]
    items = "".join(f"<li>{html.escape(line)}</li>" for line in grouped(lines))
    return f"<p><b>Refusals and flags</b></p><ul>{items}</ul>" if items else ""


def conventions(rows: Sequence[Any]) -> str:
    """Exponent under every convention the columns allow, a row for each approach and convention."""
    shown = [[r.approach, r.flops, r.n, f"{r.a:.3f}" + _ends(r.low, r.high), r.limit] for r in rows]
    return table(["approach", "FLOPs counted as", "N counted as", "a (95%)", "no answer because"], shown)


def _error(share: float) -> str:
    return f"{share:+.2%}" if abs(share) < 10 else f"{power(share)} times"


def _ends(low: float, high: float) -> str:
    return f" ({low:.3f} to {high:.3f})" if math.isfinite(low) else ""


def runs(analysis: Analysis) -> str:
    """Every run that was fitted."""
    order = sorted(analysis.table.runs, key=lambda run: (run.c_flops, run.n_params))
    rows = [
        [run.run, power(run.c_flops), quantity(run.n_params), quantity(run.d_tokens), f"{run.loss:.4f}"]
        for run in order
    ]
    return table(["run", "FLOPs", "N", "D", "loss"], rows)


def excluded(analysis: Analysis) -> str:
    """Every row that was not, with its reason."""
    return table(["run", "reason"], [[e.run, e.reason] for e in analysis.table.excluded], numbers=False)
