"""Approach 3: the published objective, recovery, certification, flags; and the optimum under FLOP conventions."""

from __future__ import annotations

import numpy as np
import pytest

from lm.config import ModelConfig
from lm.plan import flops_per_token, n_params
from sweeps.scaling.minimize import minimize_batch
from sweeps.scaling.optimum import FlopRule, flop_rule, optimum
from sweeps.scaling.parametric import Problem, certify, fit_parametric, huber_objective
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, chinchilla, grid, surface


@pytest.mark.parametrize("seed", [0, 1])
def test_epochs_chinchilla_fit(seed: int) -> None:
    table = chinchilla()
    assert len(table) == 240
    fit = fit_parametric(table, seed=seed)
    assert fit.objective <= 0.00101828
    assert fit.a == pytest.approx(0.51390, abs=5e-5)
    assert fit.e == pytest.approx(1.81722, abs=1e-4)
    assert (fit.alpha, fit.beta) == (pytest.approx(0.34731, abs=5e-5), pytest.approx(0.36717, abs=5e-5))
    assert fit.gradient < 1e-6 and fit.agreeing >= 10 and not fit.flags


def test_all_245_rows_give_the_other_exponent() -> None:
    assert fit_parametric(chinchilla(None)).a == pytest.approx(0.565, abs=1e-3)


def test_objective_is_the_published_sum() -> None:
    table = chinchilla()
    at_rounded_optimum = huber_objective(table, 1.81722, 477.83, 2143.4, 0.34731, 0.36717)
    assert at_rounded_optimum == pytest.approx(0.00101827, rel=1e-4)
    residual = 0.01
    one = RunTable.from_runs([Run("r", 1e3, 1e3, 6e6, 3.0 * np.exp(residual))])
    # N, D huge terms vanish: L = E = 3; Huber beyond delta is delta (|r| - delta / 2).
    assert huber_objective(one, 3.0, 1e-30, 1e-30, 0.3, 0.3) == pytest.approx(1e-3 * (residual - 5e-4), rel=1e-6)


def test_noise_free_surface_is_recovered() -> None:
    fit = fit_parametric(grid(surface(*HOFFMANN)))
    found = (fit.e, fit.a_coef, fit.b_coef, fit.alpha, fit.beta)
    assert found == pytest.approx(HOFFMANN, rel=2e-3)
    assert fit.a == pytest.approx(0.28 / 0.62, abs=1e-4)
    assert fit.objective < 1e-9


def test_gradient_is_the_derivative() -> None:
    table = grid(surface(*HOFFMANN), noise=0.01)
    problem = Problem(table.n, table.d, table.loss)
    theta = problem.centre(np.array([[6.2, 5.8, 0.4, 0.31, 0.29]]))
    zero = np.zeros(1, dtype=np.int64)
    _, gradient = problem(theta, zero)
    for i in range(5):
        step = np.zeros((1, 5))
        step[0, i] = 1e-6
        numeric = (problem(theta + step, zero)[0] - problem(theta - step, zero)[0]) / 2e-6
        assert gradient[0, i] == pytest.approx(numeric[0], rel=1e-4)


def test_weights_of_one_problem_do_not_reach_another() -> None:
    table = grid(surface(*HOFFMANN), noise=0.01)
    counts = np.ones((2, len(table)))
    counts[1, ::2] = 0
    both = Problem(table.n, table.d, table.loss, weights=counts)
    theta = np.repeat(both.centre(np.array([[6.2, 5.8, 0.4, 0.31, 0.29]])), 2, axis=0)
    value, _ = both(theta, np.array([0, 1]))
    swapped, _ = both(theta, np.array([1, 0]))
    assert value[0] == swapped[1] and value[1] == swapped[0] and value[0] > value[1]


def test_irreducible_loss_at_its_bound_is_flagged() -> None:
    # A surface that tends to a negative loss: the best E >= 0 is 0.
    fit = fit_parametric(grid(surface(-0.3, 406.4, 410.7, 0.34, 0.28)))
    assert [flag for flag in fit.flags if "E at its bound" in flag]
    assert fit.e < 0.01


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([Run(str(i), 10.0**i, 1e6 * i, 6e6 * i * 10.0**i, 3.0) for i in range(1, 5)], "needs 6 runs or more"),
        ([Run(str(i), 1e4, 1e6 * i, 6e10 * i, 3.0) for i in range(1, 9)], "3 distinct N or more"),
    ],
)
def test_too_little_data_is_refused(runs: list[Run], message: str) -> None:
    with pytest.raises(FitError, match=message):
        fit_parametric(RunTable.from_runs(runs))


def test_fits_that_are_not_certified_are_errors() -> None:
    with pytest.raises(FitError, match=r"relative gradient 1.0e-03"):
        certify(relative_gradient=1e-3, agreeing=40, starts=48)
    with pytest.raises(FitError, match="1 of 48 starts reach the best objective"):
        certify(relative_gradient=1e-9, agreeing=1, starts=48)
    certify(relative_gradient=1e-9, agreeing=2, starts=48)


def test_batched_minimiser_solves_different_problems_at_once() -> None:
    targets = np.array([[1.0, -2.0], [30.0, 0.5], [-4.0, 8.0]])
    scales = np.array([[1.0, 100.0], [3.0, 1.0], [0.1, 10.0]])

    def objective(x: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        miss = x - targets[which]
        return (scales[which] * miss**2).sum(axis=1), 2 * scales[which] * miss

    found = minimize_batch(objective, np.zeros((3, 2)), 1e-9)
    assert found.x == pytest.approx(targets, abs=1e-7)
    assert found.gradient_norm.max() <= 1e-9


@pytest.mark.parametrize(
    ("c", "n", "d", "loss"),
    [(1.2e19, 0.2475e9, 8.08e9, 2.950), (1e21, 1.824e9, 91.4e9, 2.329), (5.76e23, 32.2e9, 2.98e12, 1.931)],
)
def test_optimum_of_hoffmanns_surface(c: float, n: float, d: float, loss: float) -> None:
    e, a, b, alpha, beta = HOFFMANN
    theta = np.array([[np.log(a), np.log(b), np.log(e), alpha, beta]])
    found = [float(x[0]) for x in optimum(theta, FlopRule(), c)]
    assert found == pytest.approx([n, d, loss], rel=2e-3)


def test_optimum_when_attention_is_counted() -> None:
    configs = [ModelConfig(vocab_size=1024, d_model=w, n_layers=3, n_heads=w // 16) for w in range(16, 128, 16)]
    runs = [
        Run(str(w), float(n_params(m)), 1e6, 1e6 * flops_per_token(m, 128), 3.0) for w, m in enumerate(configs)
    ]  # fmt: skip
    rule = flop_rule(RunTable.from_runs(runs))
    assert rule.base == 6.0 and rule.sign == 1.0
    wide = ModelConfig(vocab_size=1024, d_model=256, n_layers=3, n_heads=16)
    k = float(rule.flops_per_parameter_token(np.float64(n_params(wide))))
    assert k == pytest.approx(flops_per_token(wide, 128) / n_params(wide), rel=0.01)
    theta = np.array([[np.log(25.0), np.log(43.0), np.log(0.5), 0.24, 0.24]])
    n, _, loss = optimum(theta, rule, 1e13)
    sizes = n[0] * np.geomspace(0.5, 2, 2001)
    along = 0.5 + 25.0 * sizes**-0.24 + 43.0 * rule.tokens(sizes, 1e13) ** -0.24
    assert sizes[along.argmin()] == pytest.approx(n[0], rel=2e-3)
    assert loss[0] == pytest.approx(along.min(), rel=1e-9)
