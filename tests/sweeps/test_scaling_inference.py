"""The inference-aware optimum: published figures, Kaplan's form, intervals, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from sweeps.scaling.bootstrap_parametric import bootstrap_parametric
from sweeps.scaling.inference import cheapest, inference_optimum
from sweeps.scaling.kaplan import bootstrap_kaplan, fit_kaplan
from sweeps.scaling.optimum import FlopRule, flop_rule
from sweeps.scaling.parametric import fit_parametric
from sweeps.scaling.surfaces import Surface
from sweeps.scaling.table import FitError
from tests.sweeps.scaling_helpers import HOFFMANN, grid, surface
from tests.sweeps.test_scaling_kaplan import law, spread

E, A, B, ALPHA, BETA = HOFFMANN
THETA = np.array([[np.log(A), np.log(B), np.log(E), ALPHA, BETA]])


@pytest.mark.parametrize(
    ("served", "n", "d"), [(0, 3.54e9, 204e9), (1e12, 1.73e9, 512e9), (1e13, 0.969e9, 1.80e12), (1e14, 0.645e9, 8.28e12)]
)
def test_hoffmanns_surface_at_a_loss_of_2_2(served: float, n: float, d: float) -> None:
    found = [float(v[0]) for v in cheapest(THETA, FlopRule(), np.array([2.2]), served)]
    assert found[:2] == pytest.approx([n, d], rel=5e-3)
    assert A / found[0] ** ALPHA + B / found[1] ** BETA + E == pytest.approx(2.2, rel=1e-9)
    # Independent check: no size near by is cheaper at this loss.
    sizes = found[0] * np.geomspace(0.5, 2, 2001)
    sizes = sizes[A / sizes**ALPHA < 2.2 - E]
    tokens = (B / (2.2 - E - A / sizes**ALPHA)) ** (1 / BETA)
    costs = 6 * sizes * tokens + 2 * sizes * served
    assert costs.min() >= found[2] * (1 - 1e-9)
    assert sizes[costs.argmin()] == pytest.approx(found[0], rel=1e-3)


def test_without_inference_it_is_the_compute_optimal_point() -> None:
    table = grid(surface(*HOFFMANN))
    model = Surface(fit_parametric(table), flop_rule(table))
    found = inference_optimum(model, 2.5, 0.0)
    assert found.n_opt == pytest.approx(model.n_opt(found.total_flops), rel=1e-4)
    assert found.d_opt == pytest.approx(model.d_opt(found.total_flops), rel=1e-4)
    assert found.inference_flops == 0 and found.training_flops == pytest.approx(6 * found.n_opt * found.d_opt)


def test_intervals_hold_the_truth() -> None:
    table = grid(surface(*HOFFMANN), noise=0.002, seed=5)
    model = Surface(fit_parametric(table), flop_rule(table))
    replicates = bootstrap_parametric(table, model.fit, model.rule, 200)
    found = inference_optimum(model, 2.4, 1e12, replicates)
    n, d, total = (float(v[0]) for v in cheapest(THETA, FlopRule(), np.array([2.4]), 1e12))
    assert n in found.n_interval and d in found.d_interval and total in found.total_interval
    assert found.total_flops == pytest.approx(found.training_flops + 2 * found.n_opt * 1e12)


def test_kaplans_form() -> None:
    table = spread(law, noise=0.002)
    model = fit_kaplan(table)
    found = inference_optimum(model, 2.6, 1e12, bootstrap_kaplan(table, model, 100))
    assert model.loss_at(found.n_opt, found.d_opt, 0.0) == pytest.approx(2.6, rel=1e-6)
    assert found.n_opt in found.n_interval
    assert found.n_opt < inference_optimum(model, 2.6, 0.0).n_opt


def test_a_loss_out_of_reach_is_refused() -> None:
    table = grid(surface(*HOFFMANN))
    model = Surface(fit_parametric(table), flop_rule(table))
    with pytest.raises(FitError, match=r"does not reach a loss of 1.6 at any size: its irreducible loss is 1.69"):
        inference_optimum(model, 1.6, 0.0)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        inference_optimum(model, 2.2, -1.0)
