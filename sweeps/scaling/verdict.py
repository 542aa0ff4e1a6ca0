"""One line over all approaches: which answer, whether they agree, which one is preferred."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sweeps.scaling.bootstrap import Interval

if TYPE_CHECKING:
    from sweeps.scaling.analysis import Result

# Flags of this kind say that the constants are not the data's.
SERIOUS = ("bound", "not positive", "not identified")
# Holdout errors within this factor of the lowest do not tell approaches apart.
TIE = 1.1
# Exponents this near to each other are one, however narrow their intervals.
SAME_EXPONENT = 0.001


def serious(flags: tuple[str, ...]) -> list[str]:
    """Flags that make a fit's constants no answer."""
    return [flag for flag in flags if any(word in flag for word in SERIOUS)]


def preferred(results: Iterable[Result]) -> Result:
    """The result that predicted held-out budgets best; one that has no intervals or serious flags only alone.

    Errors within a tenth of the lowest are a tie: they rest on one to three budgets, and another seed would order them
    anew. Of these the one with fewer flags, then the lower error.
    """
    ordered = sorted(results, key=lambda result: (_last(result), _error(result), result.approach))
    best = ordered[0]
    tied = [r for r in ordered if _last(r) == _last(best) and _error(r) <= TIE * _error(best)]
    return min(tied or ordered[:1], key=lambda result: (len(result.flags), _error(result)))


def _last(result: Result) -> bool:
    return bool(serious(result.flags)) or mostly_refused(result) or not np.isfinite(result.a_interval.low)


def _error(result: Result) -> float:
    error = result.holdout.relative_error
    return float("inf") if np.isnan(error) else error


def mostly_refused(result: Result) -> bool:
    """More than half of the budgets gave no minimum: what is left is a selection, not the sweep."""
    refused = sum("FLOPs refused" in flag for flag in result.flags)
    return 2 * refused > len(result.budgets)


def verdict(results: dict[str, Result], refused: dict[str, str]) -> str:
    """Which approaches answer, whether their exponents of N* agree, and which is preferred.

    They agree when every exponent lies in every other's interval, differ when intervals only overlap, and disagree
    when two intervals have no point in common; those are named. Without intervals nothing can be said.
    """
    if not results:
        return "no approach gave an answer"
    if len(results) == 1:
        only = next(iter(results.values()))
        why = f"{', '.join(refused)} refused" if refused else "no other was asked for"
        return f"only {only.approach} gave an answer ({why}); nothing to check it against"
    best = preferred(results.values())
    error = best.holdout.relative_error
    held = "no holdout error" if np.isnan(error) else f"holdout error {error:.1%}"
    choice = f"{best.approach} is preferred ({held})"
    judged = {name: r for name, r in results.items() if np.isfinite(r.a_interval.low)}
    silent = [name for name in results if name not in judged]
    without = f"; no interval to judge {', '.join(silent)} by" if silent else ""
    shown = ", ".join(f"{name} {r.a:.3f}" for name, r in results.items())
    if len(judged) < 2:
        return f"exponents of N* ({shown}) cannot be compared{without}; {choice}"
    names = list(judged)
    pairs = [(judged[x], judged[y]) for i, x in enumerate(names) for y in names[i + 1 :]]
    apart = [f"{x.approach} and {y.approach}" for x, y in pairs if not _overlap(x.a_interval, y.a_interval)]
    if apart:
        said = f"approaches DISAGREE on the exponent of N* ({shown}): apart are {'; '.join(apart)}"
    elif all(_holds(x.a_interval, y.a) and _holds(y.a_interval, x.a) for x, y in pairs):
        said = f"approaches agree on the exponent of N* ({shown})"
    else:
        said = f"exponents of N* differ ({shown}) but all intervals overlap"
    return f"{said}{without}; {choice}"


def _overlap(first: Interval, second: Interval) -> bool:
    return first.low <= second.high + SAME_EXPONENT and second.low <= first.high + SAME_EXPONENT


def _holds(ends: Interval, exponent: float) -> bool:
    return ends.low - SAME_EXPONENT <= exponent <= ends.high + SAME_EXPONENT
