"""Benchmark of the parametric fit: Epoch's fit of Chinchilla's points and bootstrap refits, on one core.

Beside it, when asked for, the reference procedure of Besiroglu et al. 2024 (arXiv 2404.10102): L-BFGS-B from each of
Hoffmann's 4,500 starts, then from the optimum for each resample, with numeric gradients, one after another; a stated
share of it is run and its time scaled up. Some of our refits are repeated by scipy with tight tolerances from
perturbed starts, to see that they are at the same optimum. Seconds are of this process's CPU, single-threaded.

Examples:
  python -m recipes.bench fit --runs chinchilla_epoch.csv --where 'excluded_by_epoch != 1'
  python -m recipes.bench fit --runs chinchilla_epoch.csv --where 'excluded_by_epoch != 1' --reference 0.02
  python -m recipes.bench fit                          # on points simulated on Hoffmann's surface
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import numpy as np
from scipy.optimize import minimize

from recipes.command import command_parser
from sweeps.records import read_runs
from sweeps.scaling.bootstrap import draw_counts
from sweeps.scaling.bootstrap_parametric import bootstrap_parametric
from sweeps.scaling.huber import DELTA
from sweeps.scaling.optimum import flop_rule
from sweeps.scaling.parametric import ParametricFit, Problem, fit_parametric
from sweeps.scaling.table import Array, Run, RunTable

# Hoffmann et al. 2022, appendix D.3: ln A, ln B, ln E, alpha, beta.
STARTS = list(itertools.product(range(0, 26, 5), range(0, 26, 5), (-1, -0.5, 0, 0.5, 1), *[(0, 0.5, 1, 1.5, 2)] * 2))
SAME = 1e-5


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench fit", __doc__)
    parser.add_argument("--runs", metavar="FILE.csv", help="the points; without it 240 simulated ones")
    parser.add_argument("--where", metavar="EXPR", help="keep rows for which this holds")
    parser.add_argument("--bootstrap", type=int, default=4000, help="refits")
    parser.add_argument("--verify", type=int, default=40, help="refits repeated by scipy")
    parser.add_argument("--reference", type=float, default=0.0, metavar="SHARE", help="share of the reference to run")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Runs the benchmark and prints JSON.

    Raises:
        ValueError: numbers out of range, or runs that cannot be read or fitted.
    """
    arguments = build_parser().parse_args(argv)
    if arguments.bootstrap < 1 or arguments.verify < 0 or not 0 <= arguments.reference <= 1:
        raise ValueError("--bootstrap is 1 or more, --verify 0 or more, --reference a share from 0 to 1")
    table = read_runs(arguments.runs, where=arguments.where) if arguments.runs else simulated(arguments.seed)
    result = ours(table, arguments.bootstrap, arguments.verify, arguments.seed)
    if arguments.reference:
        result["reference"] = reference(table, arguments.reference, arguments.bootstrap, arguments.seed)
        total = result["reference"]["seconds_of_the_whole"]
        result["times_faster"] = round(total / (result["seconds_fit"] + result["seconds_bootstrap"]), 1)
    print(json.dumps(result, indent=1))
    return result


def simulated(seed: int) -> RunTable:
    """240 runs on Hoffmann's surface, 1e18 to 1e22 FLOPs, with .5% noise."""
    generator = np.random.default_rng(seed)
    c = 10 ** generator.uniform(18, 22, 240)
    n = 0.09 * np.sqrt(c) * np.exp(generator.normal(0, 0.8, 240))
    d = c / (6 * n)
    loss = (1.69 + 406.4 / n**0.34 + 410.7 / d**0.28) * np.exp(0.005 * generator.standard_normal(240))
    return RunTable.from_runs(Run(str(i), *values) for i, values in enumerate(zip(n, d, c, loss, strict=True)))


def ours(table: RunTable, k: int, verify: int, seed: int) -> dict[str, Any]:
    """Fit and refits, timed, and how many of the refits scipy confirms."""
    begin = time.process_time()
    fit = fit_parametric(table, seed=seed)
    fitted = time.process_time()
    replicates = bootstrap_parametric(table, fit, flop_rule(table), k, seed, "rows")
    end = time.process_time()
    low, high = np.nanpercentile(replicates.theta, [2.5, 97.5], axis=0)
    return {
        "runs": len(table),
        "objective": fit.objective,
        "relative_gradient": fit.gradient,
        "starts_agreeing": f"{fit.agreeing} of {fit.starts}",
        "alpha": [fit.alpha, low[3], high[3]],
        "beta": [fit.beta, low[4], high[4]],
        "refits": k,
        "refits_certified_share": 1 - replicates.failed / k,
        "refits_confirmed_by_scipy": confirmed(table, fit, replicates.theta, verify, seed),
        "seconds_fit": round(fitted - begin, 3),
        "seconds_bootstrap": round(end - fitted, 3),
    }


def confirmed(table: RunTable, fit: ParametricFit, theta: Array, count: int, seed: int) -> str:
    """Of `count` refits drawn at random: those for which no start of scipy's L-BFGS-B ends lower.

    The resamples are drawn again from the seed, as the bootstrap drew them.
    """
    generator = np.random.default_rng(seed)
    generator.chisquare(max(len(table) - 5, 1), len(theta))
    counts = draw_in_parts(table, len(theta), generator)
    chosen = np.random.default_rng(seed + 1)
    good = 0
    for i in chosen.choice(len(theta), min(count, len(theta)), replace=False):
        problem = Problem(table.n, table.d, table.loss, counts[i : i + 1])
        mine = problem(problem.centre(theta[i : i + 1]), np.zeros(1, dtype=np.int64))[0][0]
        starts = np.concatenate([theta[i : i + 1], fit.theta + chosen.normal(0, [1, 1, 0.1, 0.05, 0.05], (3, 5))])
        best = min(polished(problem, start) for start in problem.centre(starts))
        good += bool(mine <= best * (1 + SAME))
    return f"{good} of {min(count, len(theta))}"


def draw_in_parts(table: RunTable, k: int, generator: np.random.Generator) -> Array:
    """[k, runs] counts, in the batches in which the bootstrap draws them."""
    from sweeps.scaling.bootstrap_parametric import BATCH_VALUES

    size = max(1, BATCH_VALUES // len(table))
    return np.concatenate([draw_counts(table, min(size, k - first), generator) for first in range(0, k, size)])


def polished(problem: Problem, start: Array) -> float:
    """Where L-BFGS-B with an exact gradient and tight tolerances ends from a start."""
    one = np.zeros(1, dtype=np.int64)

    def scalar(theta: Array) -> tuple[float, Array]:
        value, gradient = problem(theta[None], one)
        return float(value[0]), gradient[0]

    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-9}
    return float(minimize(scalar, start, jac=True, method="L-BFGS-B", options=options).fun)


def reference(table: RunTable, share: float, k: int, seed: int) -> dict[str, Any]:
    """A share of the reference procedure: plain objective, numeric gradients, scipy's defaults, one by one."""
    log_n, log_d, log_loss = np.log(table.n), np.log(table.d), np.log(table.loss)

    def objective(theta: Array, rows: np.ndarray) -> float:
        a, b, e, alpha, beta = theta
        terms = np.stack([a - alpha * log_n[rows], b - beta * log_d[rows], np.full(len(rows), e)])
        top = terms.max(axis=0)
        r = np.abs(top + np.log(np.exp(terms - top).sum(axis=0)) - log_loss[rows])
        return float(np.where(r <= DELTA, 0.5 * r * r, DELTA * (r - 0.5 * DELTA)).sum() * 1e3)

    generator, everything = np.random.default_rng(seed), np.arange(len(table))
    begin = time.process_time()
    count = max(1, round(share * len(STARTS)))
    chosen = generator.choice(len(STARTS), count, replace=False)
    found = [minimize(objective, np.array(STARTS[i]), (everything,), "L-BFGS-B") for i in chosen]
    best = min(found, key=lambda result: result.fun)
    fitted = time.process_time()
    refits = max(1, round(share * k))
    for _ in range(refits):
        minimize(objective, best.x, (generator.integers(0, len(table), len(table)),), "L-BFGS-B")
    end = time.process_time()
    return {
        "starts_run": f"{count} of {len(STARTS)}",
        "refits_run": f"{refits} of {k}",
        "objective": best.fun * 1e-3,
        "seconds_run": round(end - begin, 1),
        "seconds_of_the_whole": round((fitted - begin) * len(STARTS) / count + (end - fitted) * k / refits, 1),
    }
