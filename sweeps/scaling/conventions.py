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
from sweeps.scaling.approaches import APPROACHES, Approach, FitOptions, near_rows
from sweeps.scaling.bootstrap import NO_INTERVAL, interval
from sweeps.scaling.table import Array, FitError, Run, RunTable
from sweeps.scaling.verdict import serious

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
MIN_RUNS_A_SIZE, MIN_SIZES = 4, 5

Count = Callable[[Run], tuple[float, float]]


@dataclass(frozen=True)
class ConventionExponent:
    """Exponent of N* in C under one convention, by one approach; low and high are the ends of a 95% interval.

    For a surface the exponent is the slope of ln N* over ln C from the smallest to the largest C of the table.

    Attributes:
        limit: why the fit's constants are no answer (`verdict.serious`), so that the exponent only shows what counting
            otherwise does to it; empty where they are one.
    """

    flops: str
    n: str
    approach: str
    a: float
    low: float
    high: float
    limit: str = ""


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
    approaches: Sequence[str] = ("isoflop", "isoflop_akima", "parametric"),
    bootstrap: int = 200,
    options: FitOptions | None = None,
) -> tuple[ConventionExponent, ...]:
    """The exponent under every convention, by every approach that can be applied there.

    Args:
        approaches: keys of `approaches.APPROACHES`. Those that read IsoFLOP curves need common budgets: where C is
            counted anew, each size's loss is interpolated over its own C, see `at_common_budgets`.
        bootstrap: replicates of each interval; 0 gives none.
        options: `max_excess` chooses the runs of surfaces under the table's own convention, so that all conventions
            see the same ones.

    Returns:
        Conventions by approach; those that are refused are missing.
    """
    options = options or FitOptions()
    near, plain = conventions(near_rows(table, options)), replace(options, max_excess=None)
    found = []
    for name, whole in conventions(table).items():
        for key in approaches:
            approach = APPROACHES[key]
            try:
                rows = _with_budgets(whole) if approach.by_budget else near.get(name)
                if rows is not None:
                    found.append(_exponent(approach, rows, bootstrap, plain))
            except FitError:
                continue
    return tuple(found)


def _exponent(approach: Approach, table: RunTable, bootstrap: int, options: FitOptions) -> ConventionExponent:
    model = approach.fit(table, options)
    low, high = float(table.c.min()), float(table.c.max())
    span = np.log(high / low)
    a = model.a if approach.by_budget else float(np.log(model.n_opt(high) / model.n_opt(low)) / span)
    ends = NO_INTERVAL
    if bootstrap:
        try:
            draws = approach.bootstrap(table, model, bootstrap, options.seed, options)
            slopes = draws.a if approach.by_budget else np.log(draws.decision(high)[0] / draws.decision(low)[0]) / span
            ends = interval(slopes)
        except FitError:  # the noise is not known: the exponent stands without an interval
            pass
    limit = "; ".join(serious(model.flags))
    return ConventionExponent(table.convention, table.n_convention, approach.name, a, ends.low, ends.high, limit)


def _with_budgets(table: RunTable) -> RunTable:
    return table if all(run.budget is not None for run in table.runs) else at_common_budgets(table)


def at_common_budgets(table: RunTable) -> RunTable:
    """Each size's ln loss and ln D interpolated over ln C (monotone cubic) to as many budgets as its runs have.

    The points of one size come from the same runs, so they share a name and are resampled together.

    Raises:
        FitError: sizes with too few runs, or no range of C that 5 sizes share.
    """
    rows = [np.flatnonzero(table.n == n) for n in np.unique(table.n)]
    rows = [r[np.argsort(table.c[r])] for r in rows if len(np.unique(table.c[r])) >= MIN_RUNS_A_SIZE]
    if len(rows) < MIN_SIZES:
        raise FitError(
            f"under {table.convention} runs share no budgets, and {len(rows)} sizes have the {MIN_RUNS_A_SIZE} runs "
            f"that interpolation takes ({MIN_SIZES} sizes are needed)"
        )
    low = np.sort([table.c[r[0]] for r in rows])[MIN_SIZES - 1]
    high = np.sort([table.c[r[-1]] for r in rows])[-MIN_SIZES]
    if not high > low:
        raise FitError(f"under {table.convention} no range of FLOPs is shared by {MIN_SIZES} sizes")
    budgets = np.geomspace(low, high, max(len(r) for r in rows))
    runs = [run for r in rows for run in _interpolated(table, r, budgets)]
    return RunTable.from_runs(runs, table.excluded, table.convention, table.n_convention)


def _interpolated(table: RunTable, rows: np.ndarray, budgets: Array) -> list[Run]:
    """One size's runs at those budgets that lie between its own."""
    log_c, first = np.unique(np.log(table.c[rows]), return_index=True)
    loss = PchipInterpolator(log_c, np.log(table.loss[rows])[first])
    tokens = PchipInterpolator(log_c, np.log(table.d[rows])[first])
    n = float(table.n[rows[0]])
    return [
        Run(f"N {n:.6g}", n, float(np.exp(tokens(x))), float(np.exp(x)), float(np.exp(loss(x))), float(np.exp(x)))
        for x in np.clip(np.log(budgets), log_c[0], log_c[-1])[
            (np.log(budgets) >= log_c[0] - 1e-9) & (np.log(budgets) <= log_c[-1] + 1e-9)
        ]
    ]
