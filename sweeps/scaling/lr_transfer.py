"""Whether the best learning rate moves with the width: a line through ln LR* over ln width for each parametrisation.

Under muP the best rate should stay where it is, under the standard parametrisation it falls with the width (Yang et al.
2022, arXiv 2203.03466, figure 1). Intervals carry the noise of the curves, not the scatter of the optima around a line:
three widths say nothing of that. The spread in steps of the grid is given beside the slope for this reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import Noise, interval
from sweeps.scaling.lr_curve import COMPLETE, LrRun
from sweeps.scaling.lr_optimum import NEAREST, Optimum, fit_curves

STAYS, MOVES, SHIFTS, OPEN = "stays", "moves", "moves a little", "not decided"


@dataclass(frozen=True)
class Trend:
    """Of one parametrisation and batch.

    Attributes:
        param, batch_tokens: which.
        widths, lrs: those with an optimum, ascending.
        slope: of ln LR* over ln width; NaN with fewer than 2 optima. low, high: its 95% interval, NaN without one.
        spread: largest LR* over smallest.
        refused: widths without an optimum. edges: of these, those whose lowest loss is at an end of the rates -> which.
        word: stays, moves, moves a little (less than a step of the grid) or not decided.
    """

    param: str
    batch_tokens: int
    widths: tuple[int, ...]
    lrs: tuple[float, ...]
    slope: float
    low: float
    high: float
    spread: float
    refused: tuple[int, ...]
    edges: dict[int, str]
    word: str


@dataclass(frozen=True)
class LrAnalysis:
    """All of a learning-rate sweep.

    Attributes:
        optima: one a curve, by parametrisation, batch and width.
        trends: one a parametrisation and batch.
        noise: that the intervals carry; None when there was nothing to estimate it from.
        grid_step: largest ratio of neighbouring rates.
        near, replicates: settings of the fit.
        runs: all, with those that the fit did not use.
        excluded: (run, why) of those.
    """

    optima: tuple[Optimum, ...]
    trends: tuple[Trend, ...]
    noise: Noise | None
    grid_step: float
    near: int
    replicates: int
    runs: tuple[LrRun, ...]
    excluded: tuple[tuple[LrRun, str], ...]


def analyse_lr(
    runs: Sequence[LrRun], near: int = NEAREST, replicates: int = 2000, seed: int = 0, noise_sd: float | None = None
) -> LrAnalysis:
    """Fits every curve and a trend over widths for each parametrisation and batch; arguments of fit_curves.

    Raises:
        FitError: no runs, or a bad `near`.
    """
    optima, noise = fit_curves(runs, near, replicates, seed, noise_sd)
    rates = np.unique([run.lr for run in runs])
    step = float((rates[1:] / rates[:-1]).max()) if len(rates) > 1 else 1.0
    families = sorted({(o.param, o.batch_tokens) for o in optima})
    trends = tuple(_trend([o for o in optima if (o.param, o.batch_tokens) == family], step) for family in families)
    excluded = tuple((run, f"run is {run.status}") for run in runs if run.status != COMPLETE) + tuple(
        (run, "no finite loss") for run in runs if run.status == COMPLETE and not math.isfinite(run.loss)
    )
    return LrAnalysis(optima, trends, noise, step, near, replicates, tuple(runs), excluded)


def _trend(optima: Sequence[Optimum], step: float) -> Trend:
    good = [o for o in optima if o.ok]
    slope = low = high = spread = math.nan
    if len(good) > 1:
        x = np.log([o.width for o in good])
        weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
        slope = float(weights @ np.log([o.lr for o in good]))
        spread = max(o.lr for o in good) / min(o.lr for o in good)
        if all(len(o.samples) for o in good):
            ends = interval(weights @ np.stack([o.samples for o in good]))
            low, high = ends.low, ends.high
    refused = tuple(o.width for o in optima if not o.ok)
    return Trend(
        good[0].param if good else optima[0].param,
        optima[0].batch_tokens,
        tuple(o.width for o in good),
        tuple(o.lr for o in good),
        slope,
        low,
        high,
        spread,
        refused,
        {o.width: o.edge for o in optima if o.edge},
        _word(low, high, spread, step, bool(refused)),
    )


def _word(low: float, high: float, spread: float, step: float, refused: bool) -> str:
    """moves: the slope's interval excludes 0 and the optima differ by more than a step of the grid."""
    apart = not low <= 0 <= high and math.isfinite(low)
    if apart and spread > step:
        return MOVES
    if refused or not math.isfinite(spread):
        return OPEN
    if spread > step:
        return OPEN
    return SHIFTS if apart else STAYS
