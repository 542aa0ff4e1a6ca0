"""Kaplan's form: recovery, its optimum, certification, its bootstrap."""

from __future__ import annotations

import numpy as np
import pytest

from sweeps.scaling.kaplan import NO_FLOOR, KaplanProblem, bootstrap_kaplan, fit_kaplan, kaplan_loss
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, Surface, grid, surface

PUBLISHED = (0.076, 0.103, 6.4e13, 1.8e13)  # Kaplan et al., table 2


def law(n: float, d: float) -> float:
    return float(kaplan_loss(np.float64(n), np.float64(d), *PUBLISHED))


def spread(surface_law: Surface, noise: float = 0.0, seed: int = 0) -> RunTable:
    """Sizes times tokens, 7 x 7, where both terms of Kaplan's form matter."""
    generator = np.random.default_rng(seed)
    runs = [
        Run(f"{n:g}-{d:g}", n, d, 6 * n * d, surface_law(n, d) * float(np.exp(noise * generator.standard_normal())))
        for n in np.geomspace(1e6, 1e9, 7)
        for d in np.geomspace(2e7, 2e10, 7)
    ]
    return RunTable.from_runs(runs, convention="6ND")


def test_published_constants_are_recovered() -> None:
    fit = fit_kaplan(spread(law))
    assert (fit.alpha_n, fit.alpha_d, fit.n_c, fit.d_c) == pytest.approx(PUBLISHED, rel=1e-5)
    assert fit.agreeing >= 10 and fit.gradient < 1e-6 and fit.objective < 1e-12
    assert fit.a == pytest.approx(0.103 / 0.179, abs=1e-6)
    assert fit.flags == (NO_FLOOR,)


def test_optimum_is_the_lowest_point_of_its_budget() -> None:
    fit = fit_kaplan(spread(law))
    sizes = fit.n_opt(1e20) * np.geomspace(0.5, 2, 2001)
    losses = fit.loss(sizes, 1e20 / (6 * sizes))
    assert sizes[losses.argmin()] == pytest.approx(fit.n_opt(1e20), rel=1e-3)
    assert fit.loss_opt(1e20) == pytest.approx(losses.min(), rel=1e-9)
    assert 6 * fit.n_opt(1e20) * fit.d_opt(1e20) == pytest.approx(1e20)
    assert fit.loss_at(1e8, 1e9, 6e17) == pytest.approx(law(1e8, 1e9), rel=1e-6)


def test_derivatives() -> None:
    table = spread(law, noise=0.003)
    problem = KaplanProblem(table.n, table.d, np.log(table.loss)[None])
    theta, one = np.array([[9.0, 8.5, 0.8, -2.2]]), np.zeros(1, dtype=np.int64)
    _, gradient, hessian = problem.curved(theta, one)
    for i in range(4):
        step = np.zeros((1, 4))
        step[0, i] = 1e-7
        above, below = problem.curved(theta + step, one), problem.curved(theta - step, one)
        assert gradient[0, i] == pytest.approx((above[0] - below[0])[0] / 2e-7, rel=1e-4)
        assert hessian[0, i] == pytest.approx((above[1] - below[1])[0] / 2e-7, rel=1e-3, abs=1.0)


def test_a_surface_with_a_floor_is_promised_too_low_a_loss() -> None:
    fit = fit_kaplan(grid(surface(*HOFFMANN), spread=8))
    e, a, b, alpha, beta = HOFFMANN
    truth = e + a / 5e11**alpha + b / 1e13**beta
    assert fit.loss_at(5e11, 1e13, 3e25) < truth - 0.05


@pytest.mark.parametrize("scheme", ["rows", "noise"])
def test_bootstrap_holds_the_truth(scheme: str) -> None:
    table = spread(law, noise=0.003, seed=1)
    fit = fit_kaplan(table)
    replicates = bootstrap_kaplan(table, fit, 200, 0, scheme)
    assert replicates.failed == 0 and np.isnan(replicates.e).all()
    low, high = np.percentile(replicates.a, [2.5, 97.5])
    assert low < 0.103 / 0.179 < high and high - low < 0.05
    _, _, loss = replicates.decision(1e21)
    exact = fit_kaplan(spread(law)).loss_opt(1e21)
    assert np.percentile(loss, 2.5) < exact < np.percentile(loss, 97.5)
    planned = replicates.loss_at(1e9, 2e10, 1.2e20)
    assert np.percentile(planned, 2.5) < law(1e9, 2e10) < np.percentile(planned, 97.5)


def test_too_few_runs_are_refused() -> None:
    table = spread(law)
    with pytest.raises(FitError, match="kaplan needs 6 runs or more"):
        fit_kaplan(table.where(np.arange(len(table)) < 5))
