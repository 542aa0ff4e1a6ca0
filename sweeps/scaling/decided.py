"""What to act on at a target budget: the preferred approach's answer, its size as wide as the measured minima ask for.

An approach is preferred for how well it predicts loss, and around the optimum the loss hardly depends on the size. So
its interval of N* can be narrow and wrong where its form is. Approach 2 reads N* off the minima that were measured:
the size that is acted on has an interval over both. `python -m sweeps.backtest` measures what that is worth.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sweeps.scaling.analysis import Analysis, Decision, Result
from sweeps.scaling.bootstrap import Interval

# What reads N* off measured minima; the first that has an interval is taken in.
BY_MINIMA = ("isoflop", "isoflop_akima")


def second_opinion(analysis: Analysis, chosen: Result) -> Result | None:
    """The approach by measured minima that the size's interval covers too; None where there is none but the chosen."""
    for name in BY_MINIMA:
        result = analysis.results.get(name)
        if result is not None and np.isfinite(result.a_interval.low):
            return None if result is chosen else result
    return None


def size_intervals(analysis: Analysis, chosen: Result, c_flops: float) -> tuple[Interval, Interval]:
    """95% intervals of N* in parameters and D* in tokens, over the chosen approach and its second opinion."""
    n, d = chosen.size_intervals(c_flops)
    other = second_opinion(analysis, chosen)
    if other is None:
        return n, d
    their_n, their_d = other.size_intervals(c_flops)
    return n.hull(their_n), d.hull(their_d)


def decided(analysis: Analysis) -> tuple[Decision, ...]:
    """The preferred approach's decisions, with such intervals of N* and D*."""
    best = analysis.best
    found = []
    for decision in best.decisions:
        n, d = size_intervals(analysis, best, decision.budget)
        found.append(replace(decision, n_interval=n, d_interval=d))
    return tuple(found)
