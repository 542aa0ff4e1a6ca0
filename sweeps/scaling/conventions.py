"""The same runs under other ways of counting FLOPs and parameters, and the exponent under each.

Leaving the head out of N and C makes small models look cheaper than they are and moves the exponent of N* from .5 to
.8 (Porian et al. 2024, arXiv 2406.19146). So an exponent is shown under every convention that a table's columns allow:

- shapes (d_model, n_layers, n_heads, vocab_size, sequence_length; n_kv_heads, d_ff, tie_embeddings where they matter)
  give every convention of `lm.plan`;
- counts (n_non_embedding, n_params_total) give Kaplan's and 6 N of all parameters;
- a column C that is not 6 N D gives 6 N D too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.interpolate import PchipInterpolator

from lm.config import ModelConfig
from lm.plan import flops_per_token, n_params
from sweeps.scaling.bootstrap import Interval, interval
from sweeps.scaling.bootstrap_isoflop import bootstrap_isoflop
from sweeps.scaling.bootstrap_parametric import bootstrap_parametric
from sweeps.scaling.isoflop import NEAREST, fit_isoflop
from sweeps.scaling.optimum import flop_rule
from sweeps.scaling.parametric import fit_parametric
from sweeps.scaling.surfaces import Surface
from sweeps.scaling.table import FitError, Run, RunTable

# FLOP convention -> the N that goes with it.
NATURAL = {
    "6N": "total",
    "matmul+causal_attention": "matmul",
    "palm": "total",
    "kaplan": "non_embedding",
}
SHAPE = ("vocab_size", "d_model", "n_layers", "n_heads")
SHAPE_OPTIONAL = ("n_kv_heads", "d_ff", "d_head")
TOTAL_COLUMNS = ("n_params_total", "N_total", "n_total")
SIX = 6.0
DIFFERS = 0.01
MIN_POINTS_A_SIZE = 3

Count = Callable[[Run], tuple[float, float]]


@dataclass(frozen=True)
class ConventionExponent:
    """Exponent of N* in C under one convention, by one approach; low and high are the ends of a 95% interval.

    For a surface the exponent is the slope of ln N* over ln C from the smallest to the largest C of the table.
    """

    flops: str
    n: str
    approach: str
    a: float
    low: float
    high: float


def conventions(table: RunTable) -> dict[str, RunTable]:
    """Tables of the same runs by name `FLOPs / N`; the first is the table as it came.

    A run without the columns a convention needs is excluded from that convention's table; a convention that no run can
    be counted under is left out. Tables whose C changed have no budgets: their runs no longer share them.
    """
    given = (table.convention, table.n_convention)
    found = {_name(*given): table}
    for flops, n in NATURAL.items():
        if (flops, n) != given:
            _add(found, table, flops, n, _by_shape(flops, n))
    for flops, n, count in (
        ("kaplan", "non_embedding", _by_column(lambda run: run.n_non_embedding)),
        ("6N", "total", _by_column(_total)),
    ):
        if (flops, n) != given and _name(flops, n) not in found:
            _add(found, table, flops, n, count)
    off = np.abs(table.c / (SIX * table.n * table.d) - 1)
    if len(table) and off.max() > DIFFERS:
        _add(found, table, "6ND", table.n_convention, lambda run: (run.n_params, SIX * run.n_params * run.d_tokens))
    return found


def _name(flops: str, n: str) -> str:
    return f"{flops} / {n}"


def _add(found: dict[str, RunTable], table: RunTable, flops: str, n: str, count: Count) -> None:
    """Adds the table under a convention if every run can be counted."""
    runs = []
    for run in table.runs:
        try:
            n_new, c_new = count(run)
        except (ValueError, TypeError, KeyError):
            return
        same = abs(c_new / run.c_flops - 1) < 1e-9
        runs.append(replace(run, n_params=n_new, c_flops=c_new, budget=run.budget if same else None))
    if runs:
        found[_name(flops, n)] = RunTable.from_runs(runs, table.excluded, flops, n)


def _by_shape(flops: str, n: str) -> Count:
    def count(run: Run) -> tuple[float, float]:
        config = _config(run)
        length = int(float(str(run.extra["sequence_length"])))
        return float(n_params(config, n)), run.d_tokens * flops_per_token(config, length, flops)

    return count


def _config(run: Run) -> ModelConfig:
    """The run's shape; raises KeyError or ValueError where columns are missing or make no model."""
    numbers = {key: int(float(str(run.extra[key]))) for key in SHAPE}
    numbers |= {key: int(float(str(run.extra[key]))) for key in SHAPE_OPTIONAL if run.extra.get(key) is not None}
    return ModelConfig(**numbers, tie_embeddings=run.extra.get("tie_embeddings") is True)  # type: ignore[arg-type]


def _by_column(value: Callable[[Run], float | None]) -> Count:
    def count(run: Run) -> tuple[float, float]:
        n = value(run)
        if n is None:
            raise KeyError("the run has no such count")
        return n, SIX * n * run.d_tokens

    return count


def _total(run: Run) -> float | None:
    found = next((run.extra[key] for key in TOTAL_COLUMNS if run.extra.get(key) is not None), None)
    return None if found is None else float(str(found))


def exponents(
    table: RunTable,
    approaches: Sequence[str] = ("isoflop", "parametric"),
    bootstrap: int = 200,
    seed: int = 0,
    max_excess: float | None = None,
    near: int | None = NEAREST,
) -> tuple[ConventionExponent, ...]:
    """The exponent under every convention, by every approach that can be applied there.

    Args:
        approaches: `parametric`; `isoflop`, which needs curves at common budgets: where C is counted anew, each size's
            loss is interpolated over its own C, which takes 3 budgets or more a size.
        bootstrap: replicates of each interval; 0 gives none.
        max_excess: the surface is fitted to runs at most this far (relative) above the lowest of their budget, chosen
            under the table's own convention, so that all conventions see the same runs.

    Returns:
        Conventions by approach; those that are refused are missing.
    """
    chosen = table if max_excess is None else table.near_minimum(max_excess)
    surfaces = conventions(chosen) if "parametric" in approaches else {}
    curves = conventions(table) if "isoflop" in approaches else {}
    found = []
    for name in dict.fromkeys([*curves, *surfaces]):
        try:
            if name in curves:
                found.append(_isoflop(curves[name], bootstrap, seed, near))
        except FitError:
            pass
        try:
            if name in surfaces:
                found.append(_parametric(surfaces[name], bootstrap, seed))
        except FitError:
            pass
    return tuple(found)


def _parametric(table: RunTable, bootstrap: int, seed: int) -> ConventionExponent:
    rule = flop_rule(table)
    model = Surface(fit_parametric(table, seed=seed), rule)
    low, high = float(table.c.min()), float(table.c.max())
    span = np.log(high / low)
    ends = NO_ENDS
    if bootstrap:
        draws = bootstrap_parametric(table, model.fit, rule, bootstrap, seed)
        ends = interval(np.log(draws.decision(high)[0] / draws.decision(low)[0]) / span)
    a = float(np.log(model.n_opt(high) / model.n_opt(low)) / span)
    return ConventionExponent(table.convention, table.n_convention, "parametric", a, ends.low, ends.high)


def _isoflop(table: RunTable, bootstrap: int, seed: int, near: int | None) -> ConventionExponent:
    curves = table if all(run.budget is not None for run in table.runs) else at_common_budgets(table)
    fit = fit_isoflop(curves, near, "power")
    ends = NO_ENDS
    if bootstrap:
        ends = interval(bootstrap_isoflop(curves, fit, bootstrap, seed).a)
    return ConventionExponent(table.convention, table.n_convention, "isoflop", fit.a, ends.low, ends.high)


def at_common_budgets(table: RunTable) -> RunTable:
    """Each size's ln loss and ln D interpolated over ln C (monotone cubic) to as many budgets as its runs have.

    The points of one size come from the same runs, so they share a name and are resampled together.

    Raises:
        FitError: sizes with too few runs, or no range of C that 3 sizes share.
    """
    sizes = np.unique(table.n)
    rows = [np.flatnonzero(table.n == n) for n in sizes]
    rows = [r[np.argsort(table.c[r])] for r in rows if len(np.unique(table.c[r])) >= MIN_POINTS_A_SIZE]
    if len(rows) < MIN_POINTS_A_SIZE:
        raise FitError(
            f"under {table.convention} runs share no budgets, and only {len(rows)} sizes have the 3 runs or more that "
            "interpolation takes"
        )
    count = max(len(r) for r in rows)
    low = np.sort([table.c[r[0]] for r in rows])[MIN_POINTS_A_SIZE - 1]
    high = np.sort([table.c[r[-1]] for r in rows])[-MIN_POINTS_A_SIZE]
    if not high > low:
        raise FitError(f"under {table.convention} no range of FLOPs is shared by 3 sizes")
    runs = []
    for r in rows:
        c, first = np.unique(np.log(table.c[r]), return_index=True)
        loss, d = np.log(table.loss[r])[first], np.log(table.d[r])[first]
        for budget in np.geomspace(low, high, count):
            x = float(np.clip(np.log(budget), c[0], c[-1]))
            if abs(x - np.log(budget)) > 1e-6:
                continue
            y, z = float(PchipInterpolator(c, loss)(x)), float(PchipInterpolator(c, d)(x))
            n = float(table.n[r[0]])
            runs.append(Run(f"N {n:.6g}", n, float(np.exp(z)), float(budget), float(np.exp(y)), float(budget)))
    return RunTable.from_runs(runs, table.excluded, table.convention, table.n_convention)


NO_ENDS = Interval(float("nan"), float("nan"))
