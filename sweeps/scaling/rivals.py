"""The interval a forecast carries: of the chosen approach, stretched over every form the held-out budgets allow."""

from __future__ import annotations

from sweeps.scaling.analysis import Analysis, Result
from sweeps.scaling.bootstrap import Interval

# Another form counts as not ruled out below this relative holdout error, or within this factor of the chosen one's.
RIVAL_FLOOR = 0.005
RIVAL_FACTOR = 2.0


def forecast_interval(
    analysis: Analysis, chosen: Result, n_params: float, d_tokens: float, c_flops: float
) -> tuple[Interval, list[str]]:
    """95% interval of the loss of one planned run, nats per token.

    A bootstrap knows the noise inside one form. Which form holds beyond the grid is a doubt of its own: where the
    held-out budgets cannot tell two forms apart, the run may come out as either says.

    Returns:
        the interval, and the names of the other approaches it covers.
    """
    ends, rivals = chosen.forecast_interval(n_params, d_tokens, c_flops), []
    limit = max(RIVAL_FACTOR * chosen.holdout.relative_error, RIVAL_FLOOR)
    for name, other in analysis.results.items():
        if name == chosen.approach or other.flags or not other.holdout.relative_error <= limit:
            continue
        theirs = other.forecast_interval(n_params, d_tokens, c_flops)
        ends = Interval(min(ends.low, theirs.low), max(ends.high, theirs.high))
        rivals.append(name)
    return ends, rivals
