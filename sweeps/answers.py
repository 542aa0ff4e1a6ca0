"""Answers of a fit beyond the compute-optimal point, as lines of text: served or repeated tokens, learning rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sweeps.fit_report import quantity
from sweeps.scaling.analysis import Analysis
from sweeps.scaling.bootstrap import Interval
from sweeps.scaling.bootstrap_parametric import ParametricReplicates
from sweeps.scaling.hyperparameters import fit_hyperparameters
from sweeps.scaling.inference import inference_optimum
from sweeps.scaling.kaplan import KaplanFit, KaplanReplicates
from sweeps.scaling.parametric import fit_parametric
from sweeps.scaling.repeats import RepeatSurface, bootstrap_repeats, fit_repeats
from sweeps.scaling.surfaces import Surface
from sweeps.scaling.table import FitError, RunTable


def inference_lines(analysis: Analysis, target_loss: float, served: Sequence[float]) -> list[str]:
    """The cheapest size for a loss when tokens are served, one line for each surface and number of tokens.

    Raises:
        FitError: no surface among the results. ValueError: numbers out of range.
    """
    lines = [f"cheapest for a loss of {target_loss:g}, training and inference together:"]
    for name, result in analysis.results.items():
        if not isinstance(result.model, Surface | KaplanFit):
            continue
        draws = result.replicates if isinstance(result.replicates, ParametricReplicates | KaplanReplicates) else None
        for tokens in served:
            try:
                found = inference_optimum(result.model, target_loss, tokens, draws)
            except FitError as error:
                lines.append(f"  {name}: {error}")
                break
            lines.append(
                f"  {name}, {quantity(tokens)} tokens served: N {_with_ends(found.n_opt, found.n_interval, quantity)}, "
                f"D {_with_ends(found.d_opt, found.d_interval, quantity)}, "
                f"{_with_ends(found.total_flops, found.total_interval, _flops)} FLOPs"
            )
    if len(lines) == 1:
        raise FitError("--inference-tokens needs a surface: --approach parametric, parametric_linear, kaplan or all")
    return lines


def repeat_lines(table: RunTable, bootstrap: int, seed: int) -> list[str]:
    """R_D* and R_N* on the surface of the runs without repeats (of all runs where those are too few or too alike).

    Raises:
        FitError: too few runs with repeated tokens, or a fit that is not certified.
    """
    unique = table.optional("unique_tokens")
    fresh = table.where(~(table.d > 1.01 * unique))
    try:
        fit, which = fit_parametric(fresh, seed=seed), f"{len(fresh)} runs without repeats"
    except FitError:
        fit, which = fit_parametric(table, seed=seed), "all runs: those without repeats do not give a surface"
    found = fit_repeats(table, RepeatSurface(fit.e, fit.a_coef, fit.b_coef, fit.alpha, fit.beta))
    low, high = [np.nan] * 2, [np.nan] * 2
    if bootstrap:
        low, high = np.nanpercentile(bootstrap_repeats(table, found, bootstrap, seed), [2.5, 97.5], axis=0)
    return [
        f"repeated tokens, on the surface of {which}: objective {found.objective:.6g}",
        f"  R_D* {found.r_d:.3g} [{low[0]:.3g}, {high[0]:.3g}], R_N* {found.r_n:.3g} [{low[1]:.3g}, {high[1]:.3g}]",
        *(f"  {flag}" for flag in found.flags),
    ]


def rate_lines(table: RunTable, points: Sequence[tuple[float, float]], bootstrap: int, seed: int) -> list[str]:
    """Learning rate and batch at (N, D), with the regret of the laws at (N, D) left out of them.

    Raises:
        FitError: the table has no sweeps of the learning rate.
    """
    laws = fit_hyperparameters(table, bootstrap, seed)
    lines = [
        f"learning rate ~ N^{laws.lr_law[1]:.3f} D^{laws.lr_law[2]:.3f} from {len(laws.grids)} (N, D); "
        f"left-out regret {laws.mean_regret:.3%} mean, {laws.largest_regret:.3%} largest"
    ]
    for n, d in points:
        rate = _with_ends(laws.lr(n, d), laws.lr_interval(n, d), lambda v: f"{v:.3g}")
        batch = _with_ends(laws.batch_tokens(n, d), laws.batch_interval(n, d), quantity)
        lines.append(f"  N {quantity(n)}, D {quantity(d)}: lr {rate}, batch {batch} tokens")
    return lines + [f"  {flag}" for flag in laws.flags]


def _with_ends(value: float, ends: Interval, show: Callable[[float], str]) -> str:
    return show(value) if np.isnan(ends.low) else f"{show(value)} [{show(ends.low)}, {show(ends.high)}]"


def _flops(value: float) -> str:
    return f"{value:.3g}"
