"""All approaches on one run table: fits, intervals, holdout errors, the decision at target budgets, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sweeps.scaling.approaches import APPROACHES, Approach, FitOptions, Model, Replicates
from sweeps.scaling.bias import Bias, own_grid_bias
from sweeps.scaling.bootstrap import MAX_FAILED_SHARE, NO_INTERVAL, Interval, interval, widen
from sweeps.scaling.conventions import ConventionExponent, conventions, exponents
from sweeps.scaling.holdout import Holdout, rolling
from sweeps.scaling.holdout_runs import rolling_runs
from sweeps.scaling.hyperparameters import HyperparameterLaws, fit_hyperparameters
from sweeps.scaling.isoflop import NEAREST, Minimum, fit_isoflop
from sweeps.scaling.surfaces import Surface
from sweeps.scaling.table import Array, FitError, RunTable
from sweeps.scaling.verdict import preferred, serious, verdict
from sweeps.scaling.world import fitted_world

__all__ = ["APPROACHES", "Analysis", "Decision", "Result", "Surface", "analyse", "widen"]

NOTE = "Measured on this corpus at this scale; not a law beyond it."
CONVENTION_DRAWS = 200  # replicates of each exponent in the table of conventions
LARGEST_ERROR = 1.0  # relative error on budgets not seen, from which a fit is none


@dataclass(frozen=True)
class Decision:
    """What a fit says about one target budget, with 95% intervals.

    Attributes:
        budget: FLOPs. n_opt: parameters. d_opt: tokens. loss: nats per token at the optimum.
        n_interval, d_interval: bootstrap. loss_interval: bootstrap of a run's loss, widened by the holdout error.
        holdout_error: relative error that the held-out ones make one expect there; loss_interval has it in.
        lr, batch_tokens: learning rate and tokens a step at (n_opt, d_opt); NaN where the table cannot say.
        lr_interval, batch_interval: theirs.
    """

    budget: float
    n_opt: float
    d_opt: float
    loss: float
    n_interval: Interval
    d_interval: Interval
    loss_interval: Interval
    holdout_error: float
    lr: float = float("nan")
    lr_interval: Interval = NO_INTERVAL
    batch_tokens: float = float("nan")
    batch_interval: Interval = NO_INTERVAL


@dataclass(frozen=True)
class Result:
    """One approach on one table, with everything needed to judge it.

    Attributes:
        approach: its name, a key of APPROACHES.
        a, b: exponents of N* and D* in C, with intervals a_interval, b_interval.
        e: irreducible loss of the fit, nats per token; 0 where the form has none.
        e_interval: its interval; NaN where the form has none.
        model: the fit itself (answers n_opt, d_opt, loss_opt, loss_at).
        replicates: the bootstrap; None when no interval was asked for or could be made.
        holdout: leave-last-budget-out errors.
        decisions: one per target budget.
        flags: what limits this fit, in words.
        budgets: [budgets] FLOPs of the table.
        bias: of approach 2 on the user's own grid; None for approaches that have none.
    """

    approach: str
    a: float
    b: float
    a_interval: Interval
    b_interval: Interval
    e: float
    e_interval: Interval
    model: Model
    replicates: Replicates | None
    holdout: Holdout
    decisions: tuple[Decision, ...]
    flags: tuple[str, ...]
    budgets: Array
    bias: Bias | None = None

    def size_intervals(self, c_flops: float) -> tuple[Interval, Interval]:
        """95% intervals of N* in parameters and D* in tokens, by the bootstrap."""
        if self.replicates is None:
            return NO_INTERVAL, NO_INTERVAL
        n, d, _ = self.replicates.decision(c_flops)
        return interval(n), interval(d)

    def forecast_interval(self, n_params: float, d_tokens: float, c_flops: float, seed: int = 0) -> Interval:
        """95% interval of the loss one planned run will measure.

        Spread of the bootstrap around the fitted loss at (N, D), plus the noise of a single run, then widened in
        quadrature by the holdout errors, scaled to the target's distance from the grid. It is around the fit's own
        value, as that is what the held-out errors are of: a bias that all budgets share is in them.
        """
        if self.replicates is None:
            return NO_INTERVAL
        draws = self.replicates.loss_at(n_params, d_tokens, c_flops)
        if not np.isfinite(draws).any():
            return NO_INTERVAL
        noise = np.random.default_rng(seed + 1).standard_normal(len(draws)) * self.replicates.noise_sd
        centre = self.model.loss_at(n_params, d_tokens, c_flops)
        drawn = interval(draws * (centre / np.nanmedian(draws)) * np.exp(noise))
        widening = self.holdout.widening(c_flops, self.budgets)
        wide = widen(drawn, centre, 0.0 if np.isnan(widening) else widening * centre)
        return Interval(max(wide.low, 0.0), wide.high) if wide.low < 0 else wide


@dataclass(frozen=True)
class Analysis:
    """Every approach asked for.

    Attributes:
        table: the runs, and those excluded with reasons.
        results: by approach. refused: reason by approach that gave no answer.
        minima: IsoFLOP curves, also where approach 2 as a whole is refused.
        verdict: one line: do the approaches agree, and which predicts held-out budgets better.
        conventions: exponents under every FLOP and N convention the table's columns allow.
    """

    table: RunTable
    results: dict[str, Result]
    refused: dict[str, str]
    minima: tuple[Minimum, ...]
    verdict: str
    conventions: tuple[ConventionExponent, ...] = ()

    @property
    def best(self) -> Result:
        """The preferred approach's result, see `verdict.preferred`.

        Raises:
            FitError: every approach was refused.
        """
        if not self.results:
            reasons: dict[str, list[str]] = {}
            for name, reason in self.refused.items():
                reasons.setdefault(reason, []).append(name)
            told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
            raise FitError(f"no approach gave an answer: {told}")
        return preferred(self.results.values())


def analyse(
    table: RunTable,
    approaches: Sequence[str] | None = None,
    budgets: Sequence[float] = (),
    bootstrap: int = 1000,
    seed: int = 0,
    near: int | None = NEAREST,
    max_excess: float | None = None,
    loss_form: str = "auto",
    noise_sd: float | None = None,
) -> Analysis:
    """Fits every approach asked for; one that cannot answer is listed in `refused` with its reason.

    Args:
        approaches: names out of APPROACHES; None takes all.
        budgets: target FLOPs to decide for.
        bootstrap: replicates; 0 gives no intervals.
        seed, near, max_excess, loss_form, noise_sd: see `approaches.FitOptions`.

    Raises:
        ValueError: unknown approach.
    """
    names = tuple(APPROACHES) if approaches is None else tuple(approaches)
    unknown = [name for name in names if name not in APPROACHES]
    if unknown:
        raise ValueError(f"unknown approach {unknown[0]!r}; choose from {', '.join(APPROACHES)} or all")
    if len(table) == 0:
        reason = f"no usable runs in the table: {table.why_empty()}"
        return Analysis(table, {}, dict.fromkeys(names, reason), (), "no runs")
    table = table.in_order()
    options = FitOptions(near, max_excess, loss_form, noise_sd, seed)
    minima = _minima(table, near)
    laws = _laws(table, bootstrap, seed)
    results: dict[str, Result] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            results[name] = _result(APPROACHES[name], table, minima, budgets, bootstrap, options, laws)
        except FitError as error:
            refused[name] = str(error)
    several = len(conventions(table)) > 1
    shown = exponents(table, bootstrap=min(bootstrap, CONVENTION_DRAWS), options=options) if several else ()
    return Analysis(table, results, refused, minima, verdict(results, refused), shown)


def _laws(table: RunTable, bootstrap: int, seed: int) -> HyperparameterLaws | None:
    """Laws of learning rate and batch, where the table has the columns and several learning rates a point."""
    try:
        return fit_hyperparameters(table, max(bootstrap, 1), seed)
    except FitError:
        return None


def _minima(table: RunTable, near: int | None) -> tuple[Minimum, ...]:
    try:
        return fit_isoflop(table, near, "power").minima
    except FitError:
        return ()


def _result(
    approach: Approach,
    table: RunTable,
    minima: tuple[Minimum, ...],
    budgets: Sequence[float],
    bootstrap: int,
    options: FitOptions,
    laws: HyperparameterLaws | None,
) -> Result:
    model = approach.fit(table, options)
    if unusable := serious(model.flags):
        raise FitError("; ".join(unusable))
    flags = list(model.flags)
    replicates = _draws(approach, table, model, bootstrap, options, flags)
    holdout = _holdout(approach, table, minima, options, flags)
    if holdout.relative_error > LARGEST_ERROR:
        raise FitError(f"it misses what it has not seen by over {LARGEST_ERROR:.0%}: these runs follow no such law")
    a_ends = b_ends = e_ends = NO_INTERVAL
    if replicates is not None:
        a_ends, b_ends, e_ends = interval(replicates.a), interval(replicates.b), interval(replicates.e)
    result = Result(
        approach=approach.name,
        a=model.a,
        b=model.b,
        a_interval=a_ends,
        b_interval=b_ends,
        e=model.e,
        e_interval=e_ends,
        model=model,
        replicates=replicates,
        holdout=holdout,
        decisions=(),
        flags=tuple(flags),
        budgets=table.budgets,
        bias=_bias(approach, table, budgets, options),
    )
    return replace(result, decisions=tuple(_decide(result, float(c), options.seed, laws) for c in budgets))


def _bias(approach: Approach, table: RunTable, budgets: Sequence[float], options: FitOptions) -> Bias | None:
    """Bias at the first target, or at the largest budget where none is given; None for surfaces."""
    fitted = fitted_world(table, options.seed) if approach.by_budget else None
    if fitted is None:
        return None
    target = float(budgets[0]) if len(budgets) else float(table.budgets.max())
    return own_grid_bias(table, fitted[0], target, lambda part: approach.fit(part, options))


def _draws(
    approach: Approach, table: RunTable, model: Model, bootstrap: int, options: FitOptions, flags: list[str]
) -> Replicates | None:
    """The bootstrap; None, with a flag that says why, where it cannot be made."""
    if not bootstrap:
        return None
    try:
        replicates = approach.bootstrap(table, model, bootstrap, options.seed, options)
    except FitError as error:
        flags.append(f"no intervals: {error}")
        return None
    if replicates.failed:
        too_many = ", too many for an interval" if replicates.failed > MAX_FAILED_SHARE * bootstrap else ""
        flags.append(f"{replicates.failed} of {bootstrap} bootstrap replicates refused{too_many}")
    return replicates


def _holdout(
    approach: Approach, table: RunTable, minima: tuple[Minimum, ...], options: FitOptions, flags: list[str]
) -> Holdout:
    if any(run.budget is None for run in table.runs):
        holdout = rolling_runs(table, lambda part: approach.fit(part, options))
    else:
        holdout = rolling(table, minima, lambda part: approach.fit(part, options))
    if holdout.reason:
        flags.append(f"holdout: {holdout.reason}")
    return holdout


def _decide(result: Result, budget: float, seed: int, laws: HyperparameterLaws | None) -> Decision:
    model = result.model
    n, d = model.n_opt(budget), model.d_opt(budget)
    decision = Decision(
        budget, n, d, result.model.loss_at(n, d, budget), *result.size_intervals(budget),
        result.forecast_interval(n, d, budget, seed), result.holdout.error_at(budget, result.budgets),
    )  # fmt: skip
    if laws is None:
        return decision
    lr, batch = laws.lr(n, d), laws.batch_tokens(n, d)
    if result.replicates is None:
        return replace(decision, lr=lr, batch_tokens=batch)
    ends, batch_ends = laws.lr_interval(n, d), laws.batch_interval(n, d)
    return replace(decision, lr=lr, lr_interval=ends, batch_tokens=batch, batch_interval=batch_ends)
