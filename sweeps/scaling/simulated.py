"""Simulated sweeps of known surfaces: designs of budgets and sizes, and one noisy sweep of such a design."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.surfaces import KnownSurface
from sweeps.scaling.table import Run, RunTable


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
        its table, the target budget, and the factor by which noise moves the loss of one run there.
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
    return RunTable.from_runs(runs), target, math.exp(design.noise * generator.standard_normal())
