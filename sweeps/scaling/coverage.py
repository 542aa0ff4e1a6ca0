"""Measures how often nominal 95% intervals hold the truth, on simulated sweeps whose truth is known.

Each sweep draws a design (budgets x sizes, centred off the optimum by a random factor) and noise of ln loss, is fitted
as `sweeps.fit` fits it, and its intervals of a, N*, D* and of the loss that a run at the optimum measures, at a target
budget, are held against the surface's own values.

Examples:
  python -m sweeps.scaling.coverage --sweeps 100
  python -m sweeps.scaling.coverage --surface ratio3 --approach isoflop --design small --json coverage.json
  python -m sweeps.scaling.coverage --sweeps 500 --jobs 2 --json coverage.json       (again: goes on where it stopped)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.command import command_parser, exit_status
from sweeps.scaling.analysis import analyse
from sweeps.scaling.approaches import APPROACHES
from sweeps.scaling.surfaces import SURFACES, KnownSurface
from sweeps.scaling.table import Run, RunTable

QUANTITIES = ("a", "n_opt", "d_opt", "loss")
CHUNK = 10
NOMINAL = (0.92, 0.98)


@dataclass(frozen=True)
class Design:
    """Budgets and sizes of a simulated sweep.

    Attributes:
        budgets: count over `decades` from 1e18 FLOPs up. sizes: a budget, geometric over +-`spread`.
        noise: sd of ln loss of one run. off_centre: sd of the ln factor by which a sweep's sizes miss the optimum.
        reach: target budget over the largest one.
    """

    name: str
    budgets: int
    decades: float
    sizes: int
    spread: float
    noise: float
    off_centre: float = 0.2
    reach: float = 10.0


DESIGNS = {
    design.name: design
    for design in (
        Design("small", 5, 1.5, 6, 3.0, 0.002),
        Design("medium", 6, 2.0, 7, 4.0, 0.003),
        Design("large", 7, 2.0, 8, 5.0, 0.005),
    )
}


def simulate(surface: KnownSurface, design: Design, seed: int) -> tuple[RunTable, float, float]:
    """One sweep.

    Returns:
        its table, the target budget, and the loss a run at the target's optimum measures.
    """
    generator = np.random.default_rng(seed)
    shift = math.exp(design.off_centre * generator.standard_normal())
    runs = []
    for c in np.geomspace(1e18, 1e18 * 10**design.decades, design.budgets):
        for n in float(surface.n_opt(c)) * shift * np.geomspace(1 / design.spread, design.spread, design.sizes):
            d = c / (6 * n)
            loss = float(surface.loss(n, d)) * math.exp(design.noise * generator.standard_normal())
            runs.append(Run(f"{c:.3g}-{n:.3g}", float(n), float(d), float(c), loss, float(c)))
    target = design.reach * 10**design.decades * 1e18
    measured = float(surface.loss(surface.n_opt(target), surface.d_opt(target)))
    return RunTable.from_runs(runs), target, measured * math.exp(design.noise * generator.standard_normal())


def one_sweep(
    surface: KnownSurface, design: Design, approaches: Sequence[str], bootstrap: int, seed: int
) -> dict[str, list[float]]:
    """Where the truth lies in each interval.

    Returns:
        by approach: per quantity 1 when inside, 0 when outside, NaN when refused; then ln widths of N*'s and the
        loss's interval and ln errors of a, N* and the loss.
    """
    table, target, measured = simulate(surface, design, seed)
    n, d = float(surface.n_opt(target)), float(surface.d_opt(target))
    analysis = analyse(table, approaches, [target], bootstrap, seed)
    out = {}
    for name in approaches:
        if name not in analysis.results:
            out[name] = [math.nan] * 8
            continue
        result = analysis.results[name]
        decision = result.decisions[0]
        pairs = [
            (surface.a, result.a_interval),
            (n, decision.n_interval),
            (d, decision.d_interval),
            (measured, result.forecast_interval(n, d, target, seed)),
        ]
        held = [math.nan if math.isnan(i.low) else float(x in i) for x, i in pairs]
        out[name] = [
            *held,
            math.log(decision.n_interval.high / decision.n_interval.low),
            math.log(pairs[3][1].high / pairs[3][1].low),
            result.a - surface.a,
            math.log(decision.n_opt / n),
        ]
    return out
