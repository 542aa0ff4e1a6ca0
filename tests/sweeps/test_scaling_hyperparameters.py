"""Learning-rate and batch laws: Step Law's grids, recovery, coverage, refusals."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from sweeps.scaling.hyperparameters import fit_hyperparameters, score_laws
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import published


def step_law_runs() -> RunTable:
    with published("steplaw_dense.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs = []
    for i, row in enumerate(rows):
        n, d = float(row["N_params"]), float(row["D_tokens"])
        batch = 2048 * float(row["bs_seqs"])
        runs.append(
            Run(str(i), n, d, 6 * n * d, float(row["smooth_loss"]), lr=float(row["lr"]), batch_tokens=batch)
        )  # fmt: skip
    return RunTable.from_runs(runs)


def test_step_laws_grids() -> None:
    table = step_law_runs()
    laws = fit_hyperparameters(table)
    assert len(laws.grids) == len(laws.regrets) == 17 and laws.scheme == "runs and (N, D)"
    # The best that was known: .104% mean, .234% largest, with the batch a law of D alone.
    assert laws.mean_regret * 100 <= 0.104 and laws.largest_regret * 100 <= 0.234
    assert (laws.mean_regret * 100, laws.largest_regret * 100) == pytest.approx((0.064, 0.215), abs=1e-3)
    n, d = 1e9, 1e11
    assert laws.lr(n, d) in laws.lr_interval(n, d) and laws.batch_tokens(n, d) in laws.batch_interval(n, d)
    interval = laws.lr_interval(n, d)
    assert 1.05 < interval.high / interval.low < 3


def test_scoring_agrees_with_the_published_laws_regret() -> None:
    """Published: .098% mean, .310% largest; the mean depends on how ties of the nearest grid point are broken."""
    scores = score_laws(step_law_runs(), lambda n, d: 1.79 * n**-0.713 * d**0.307, lambda n, d: 0.58 * d**0.571)
    regrets = np.array([score.regret for score in scores]) * 100
    assert len(regrets) == 17
    assert regrets.mean() == pytest.approx(0.098, abs=0.004)
    assert regrets.max() == pytest.approx(0.310, abs=1e-3)


def made(seed: int, sizes: int = 3, noise: float = 5e-4) -> RunTable:
    """Grids whose loss is quadratic in ln lr and ln batch around lr = 2 N^-.4 D^.1, batch = 50 D^.5."""
    generator = np.random.default_rng(seed)
    runs = []
    for n in np.geomspace(1e7, 1e9, sizes):
        for ratio in (10, 20, 40):
            d = n * ratio
            best_lr, best_batch = np.log(2 * n**-0.4 * d**0.1), np.log(50 * d**0.5)
            for lr in np.log(2.0) * np.arange(round(best_lr / np.log(2)) - 3, round(best_lr / np.log(2)) + 4):
                for batch in np.log(2.0) * np.arange(
                    round(best_batch / np.log(2)) - 2, round(best_batch / np.log(2)) + 3
                ):
                    excess = 0.004 * (lr - best_lr) ** 2 + 0.003 * (batch - best_batch) ** 2
                    loss = 3 * np.exp(excess + noise * generator.standard_normal())
                    rate, tokens = float(np.exp(lr)), float(np.exp(batch))
                    runs.append(Run(str(len(runs)), n, d, 6 * n * d, loss, lr=rate, batch_tokens=tokens))
    return RunTable.from_runs(runs)


def test_known_laws_are_recovered_and_covered() -> None:
    n, d = 1e10, 2e11
    lr, batch = 2 * n**-0.4 * d**0.1, 50 * d**0.5
    hits = []
    for seed in range(20):
        laws = fit_hyperparameters(made(seed), bootstrap=300, seed=seed)
        assert laws.lr(n, d) == pytest.approx(lr, rel=0.5)
        hits.append((lr in laws.lr_interval(n, d), batch in laws.batch_interval(n, d)))
    assert (np.mean(hits, axis=0) >= 0.8).all()


def test_rows_without_batches_give_a_law_of_the_rate() -> None:
    runs = [
        Run(f"{n:g}-{lr:g}", n, 20 * n, 120 * n * n, 3 + 0.1 * np.log(lr / (1e-3 * (n / 1e7) ** -0.5)) ** 2, lr=lr)
        for n in (1e7, 3e7, 1e8)
        for lr in 1e-3 * (n / 1e7) ** -0.5 * 2.0 ** np.arange(-2, 3)
    ]
    laws = fit_hyperparameters(RunTable.from_runs(runs), bootstrap=50)
    assert laws.scheme == "runs within each (N, D)"
    assert laws.lr(1e9, 2e10) == pytest.approx(1e-4, rel=1e-6)  # N and D move together: one slope serves for both
    assert np.isnan(laws.batch_tokens(1e9, 2e10)) and np.isnan(laws.batch_interval(1e9, 2e10).low)
    assert laws.largest_regret == pytest.approx(0.0)


def test_what_cannot_be_fitted_is_said() -> None:
    one = [Run(str(i), 1e7, 1e9, 6e16, 3.0 + i, lr=10.0**-i) for i in range(1, 5)]
    with pytest.raises(FitError, match="no run has a learning rate"):
        fit_hyperparameters(RunTable.from_runs([Run("a", 1e7, 1e9, 6e16, 3.0)]))
    with pytest.raises(FitError, match=r"need 2 \(N, D\) or more with 3 learning rates each, got 1"):
        fit_hyperparameters(RunTable.from_runs(one))
    two = one + [Run(f"b{i}", 1e8, 1e9, 6e17, 2.0 + i, lr=10.0**-i) for i in range(1, 5)]
    laws = fit_hyperparameters(RunTable.from_runs(two), bootstrap=20)
    assert len([flag for flag in laws.flags if "the best learning rate is the highest tried" in flag]) == 2
