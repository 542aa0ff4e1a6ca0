"""How good the forecasts were: coverage of the 95% intervals, bias, interval score; as text and as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from lm.data.files import plain
from sweeps.fit_report import quantity
from sweeps.ledger_rows import DIVERGED, INSIDE, LATE_WORD, LEVEL, Row, interval_score
from sweeps.scaling.bootstrap import Interval

ALL = "all experiments"


@dataclass(frozen=True)
class Score:
    """Over decided forecasts; late ones are left out.

    Attributes:
        scored: how many. inside: of them. diverged: of them, without a loss (they count as outside).
        open: not decided yet. late: never scored.
        share: inside / scored; share_interval: its 95% Clopper-Pearson interval; NaN without any.
        error: mean of measured / predicted - 1. interval_score: mean, in nats per token. Both over those with a loss.
    """

    scored: int
    inside: int
    diverged: int
    open: int
    late: int
    share: float
    share_interval: Interval
    error: float
    interval_score: float

    @property
    def verdict(self) -> str:
        """Whether the nominal 95% is in doubt."""
        if not self.scored:
            return "no forecast is decided yet"
        low, high = self.share_interval.low, self.share_interval.high
        if high < LEVEL:
            return "the intervals are too narrow"
        if low > LEVEL:
            return "the intervals are too wide"
        return f"agrees with 95%, as would any true share from {low:.0%} to {high:.0%}"


def score(rows: Sequence[Row]) -> Score:
    """The score of some forecasts."""
    decided = [row for row in rows if row.scored]
    inside = sum(row.status == INSIDE for row in decided)
    measured = [row for row in decided if math.isfinite(row.measured)]
    scores = [interval_score(row.low, row.high, row.measured) for row in measured]
    late = sum(row.status == LATE_WORD for row in rows)
    return Score(
        scored=len(decided),
        inside=inside,
        diverged=sum(row.status == DIVERGED for row in decided),
        open=len(rows) - len(decided) - late,
        late=late,
        share=inside / len(decided) if decided else math.nan,
        share_interval=binomial_interval(inside, len(decided)),
        error=float(np.mean([row.error for row in measured])) if measured else math.nan,
        interval_score=float(np.mean(scores)) if scores else math.nan,
    )


def binomial_interval(successes: int, count: int) -> Interval:
    """95% interval of a share by Clopper and Pearson 1934: exact, never too narrow; NaN for no trials."""
    from scipy.stats import binomtest

    if count == 0:
        return Interval(math.nan, math.nan)
    ends = binomtest(successes, count).proportion_ci(LEVEL, method="exact")
    return Interval(float(ends.low), float(ends.high))


def score_by(rows: Sequence[Row]) -> dict[str, Score]:
    """A score for each experiment, then one over all when there are several."""
    names = sorted({row.experiment for row in rows})
    scores = {name: score([row for row in rows if row.experiment == name]) for name in names}
    return scores if len(names) < 2 else {**scores, ALL: score(rows)}


def ledger_text(rows: Sequence[Row]) -> str:
    """The ledger as text: a line a forecast, oldest first, then the scores."""
    if not rows:
        return "no forecasts: python -m sweeps.forecast or sweeps.decide writes one before a run starts"
    head = f"{'forecast':<14}{'made':<12}{'FLOPs':>9}{'N':>8}  {'predicted':<24}{'measured':>9}{'off':>8}  outcome"
    lines = [head, *(_line(row) for row in rows), ""]
    for name, total in score_by(rows).items():
        lines += _score_lines(name, total)
    return "\n".join(lines)


def _line(row: Row) -> str:
    made = datetime.fromtimestamp(row.made_ms / 1000, UTC).strftime("%Y-%m-%d")
    predicted = f"{row.loss:.3f} [{row.low:.3f}, {row.high:.3f}]"
    known = math.isfinite(row.measured)
    measured, error = (f"{row.measured:.3f}", f"{row.error:+.2%}") if known else ("-", "-")
    note = f" ({row.note})" if row.note else ""
    return (
        f"{row.forecast_id:<14}{made:<12}{row.c_flops:>9.3g}{quantity(row.n_params):>8}  {predicted:<24}"
        f"{measured:>9}{error:>8}  {row.status}{note}"
    )


def _score_lines(name: str, total: Score) -> list[str]:
    waiting = f"{total.open} open" + (f", {total.late} late and not scored" if total.late else "")
    if not total.scored:
        return [f"{name}: {waiting}; {total.verdict}"]
    ends = total.share_interval
    gone = f" ({total.diverged} diverged or given up)" if total.diverged else ""
    return [
        f"{name}: {total.inside} of {total.scored} inside their 95% interval{gone}: {total.share:.0%}, "
        f"95% interval [{ends.low:.0%}, {ends.high:.0%}]: {total.verdict}",
        f"  mean signed error {total.error:+.2%}, mean interval score {total.interval_score:.4f} nats; {waiting}",
    ]


def ledger_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows and scores as plain values for JSON; NaN becomes None."""
    listed = [{**asdict(row), "error": row.error} for row in rows]
    return plain({"rows": listed, "scores": {name: asdict(total) for name, total in score_by(rows).items()}})
