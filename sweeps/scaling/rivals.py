"""What a decision must allow for: every form of the law that the held-out budgets do not rule out.

A bootstrap knows the noise inside one form, not which form holds beyond the grid. Where held-out budgets cannot tell
two forms apart, the optimum may lie, and the run may come out, as either says: so the intervals that are acted on cover
both. `python -m sweeps.scaling.coverage --approach preferred` measures what that is worth.
"""

from __future__ import annotations

from dataclasses import replace

from sweeps.scaling.analysis import Analysis, Decision, Result
from sweeps.scaling.approaches import APPROACHES
from sweeps.scaling.bootstrap import Interval

# A form counts as not ruled out below this relative holdout error, or within this factor of the chosen one's.
RIVAL_FLOOR = 0.005
RIVAL_FACTOR = 2.0


def rivals(analysis: Analysis, chosen: Result) -> list[Result]:
    """The most precise result of every other form that the held-out budgets do not rule out.

    Not ruled out: its errors there are no more than noise and its own bias explain, or small, or about those of the
    chosen one. Flagged fits (a bound, refused budgets or replicates) do not count.
    """
    limit = max(RIVAL_FACTOR * chosen.holdout.relative_error, RIVAL_FLOOR)
    found: dict[str, Result] = {}
    unflagged = [result for result in analysis.results.values() if not result.flags]
    for other in sorted(unflagged, key=lambda result: result.a_interval.width):
        form = APPROACHES[other.approach].form
        if form == APPROACHES[chosen.approach].form or form in found:
            continue
        if other.holdout.within_noise or other.holdout.relative_error <= limit:
            found[form] = other
    return list(found.values())


def forecast_interval(
    analysis: Analysis, chosen: Result, n_params: float, d_tokens: float, c_flops: float
) -> tuple[Interval, list[str]]:
    """95% interval of the loss of one planned run, nats per token, over the chosen form and its rivals.

    Returns:
        the interval, and the names of the rivals it covers.
    """
    others = rivals(analysis, chosen)
    ends = chosen.forecast_interval(n_params, d_tokens, c_flops)
    for other in others:
        ends = ends.hull(other.forecast_interval(n_params, d_tokens, c_flops))
    return ends, [other.approach for other in others]


def size_intervals(analysis: Analysis, chosen: Result, c_flops: float) -> tuple[Interval, Interval]:
    """95% intervals of N* in parameters and D* in tokens, over the chosen form and its rivals."""
    n, d = chosen.size_intervals(c_flops)
    for other in rivals(analysis, chosen):
        their_n, their_d = other.size_intervals(c_flops)
        n, d = n.hull(their_n), d.hull(their_d)
    return n, d


def decided(analysis: Analysis) -> tuple[Decision, ...]:
    """What to act on at each target budget: the preferred approach's decisions, with intervals over its rivals too."""
    best = analysis.best
    found = []
    for decision in best.decisions:
        n, d = size_intervals(analysis, best, decision.budget)
        loss, _ = forecast_interval(analysis, best, decision.n_opt, decision.d_opt, decision.budget)
        found.append(replace(decision, n_interval=n, d_interval=d, loss_interval=loss))
    return tuple(found)
