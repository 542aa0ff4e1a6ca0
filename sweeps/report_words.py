"""What a fit says, in sentences: the decision, how far it reaches, whether the approaches agree, what to beware of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sweeps.fit_report import grouped, quantity
from sweeps.scaling.analysis import Analysis, Decision
from sweeps.scaling.bootstrap import Interval
from sweeps.scaling.decided import decided, second_opinion

FAR = 30.0  # a target further beyond the largest budget than this gets a warning
WIDE = 4.0  # so does an N* whose interval's ends differ by more than this factor


def power(value: float) -> str:
    """3.8e+25 -> 3.8e25."""
    return f"{value:.3g}".replace("e+", "e")


def span(ends: Interval, digits: int | None = None) -> str:
    """An interval in words' form; a dash without one."""
    if math.isnan(ends.low):
        return "–"
    if digits is None:
        return f"{quantity(ends.low)} to {quantity(ends.high)}"
    return f"{plain(ends.low, digits)} to {plain(ends.high, digits)}"


def plain(value: float, digits: int) -> str:
    """1.8847 -> 1.885; a number that is out of all proportion (a law that failed) in powers of ten."""
    return f"{value:.{digits}f}" if abs(value) < 1e4 else power(value)


def tiles(decision: Decision) -> list[tuple[str, str, str]]:
    """(name, value, interval or ratio) of what a budget should be spent on."""
    shown = [
        ("Size N*", f"{quantity(decision.n_opt)} parameters", f"95%: {span(decision.n_interval)}"),
        ("Tokens D*", f"{quantity(decision.d_opt)} tokens", f"95%: {span(decision.d_interval)}"),
        ("Expected loss", f"{plain(decision.loss, 3)} nats/token", f"95%: {span(decision.loss_interval, 3)}"),
        ("Tokens per parameter", f"{decision.d_opt / decision.n_opt:.3g}", "D* over N*"),
    ]
    if math.isfinite(decision.lr):
        low, high = decision.lr_interval.low, decision.lr_interval.high
        shown.append(("Learning rate", f"{decision.lr:.2e}", f"95%: {low:.1e} to {high:.1e}"))
    if math.isfinite(decision.batch_tokens):
        batch = f"{quantity(decision.batch_tokens)} tokens a step"
        shown.append(("Batch", batch, f"95%: {span(decision.batch_interval)}"))
    return shown


def decision_sentence(analysis: Analysis, index: int) -> str:
    """One target budget: what to train, by which approach, and where the others would go."""
    best = analysis.best
    decision = best.decisions[index]
    others = [r.decisions[index].n_opt for name, r in analysis.results.items() if name != best.approach]
    text = (
        f"Spend {power(decision.budget)} FLOPs on a model of {quantity(decision.n_opt)} parameters and "
        f"{quantity(decision.d_opt)} tokens, says {best.approach}, the preferred fit"
    )
    if other := second_opinion(analysis, best):
        text += f" (the interval of the size also covers that of {other.approach}, which reads it off measured minima)"
    finite = [n for n in others if math.isfinite(n)]
    if not finite:
        return text + "; no other approach gave an answer to hold against it."
    if len(finite) == 1:
        return text + f"; the other approach puts the size at {quantity(finite[0])}."
    return text + f"; the other approaches put the size between {quantity(min(finite))} and {quantity(max(finite))}."


def cautions(analysis: Analysis) -> list[str]:
    """What a reader must know before acting, most serious first."""
    best = analysis.best
    found: list[str] = []
    largest = float(analysis.table.budgets.max())
    for decision in decided(analysis):
        reach = decision.budget / largest
        if reach > FAR:
            found.append(
                f"{power(decision.budget)} FLOPs is {quantity(reach)} times the largest budget measured: "
                "the intervals know the noise of the runs, not whether the form holds that far."
            )
        ends = decision.n_interval
        if math.isfinite(ends.low) and ends.high / ends.low > WIDE:
            found.append(
                f"The size at {power(decision.budget)} FLOPs is known only within a factor of "
                f"{ends.high / ends.low:.1f}; more runs near the optimum would narrow it."
            )
    found += [f"{best.approach}: {flag}." for flag in best.flags]
    found = grouped(found, few=1)
    if not best.holdout.points:
        found.append("No budget could be held out, so nothing tells how far the fit misses what it has not seen.")
    return found


def summary_class(analysis: Analysis) -> str:
    """`bad` where approaches disagree or none answers, `warn` where they differ inside their intervals, else `good`."""
    verdict = analysis.verdict
    if "DISAGREE" in verdict or not analysis.results:
        return "bad"
    return "warn" if "differ" in verdict or "only" in verdict else "good"


def excluded_summary(reasons: Sequence[str]) -> list[tuple[str, int]]:
    """Reasons with how many rows each took, most first."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])
