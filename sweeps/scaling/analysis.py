"""All approaches on one run table: fits, intervals, holdout errors, the decision at target budgets, a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.scaling.bootstrap import Interval, interval
from sweeps.scaling.bootstrap_isoflop import IsoFlopReplicates, bootstrap_isoflop
from sweeps.scaling.bootstrap_parametric import ParametricReplicates, bootstrap_parametric
from sweeps.scaling.holdout import Holdout, Predictor, rolling
from sweeps.scaling.isoflop import NEAREST, IsoFlopFit, Minimum, fit_isoflop
from sweeps.scaling.optimum import FlopRule, flop_rule, optimum
from sweeps.scaling.parametric import ParametricFit, fit_parametric
from sweeps.scaling.table import Array, FitError, RunTable

APPROACHES = ("isoflop", "parametric")
NOTE = "Measured on this corpus at this scale; not a law beyond it."
# Holdout errors are one to three numbers, so their spread is wider than their size: see docs/scaling.md.
HOLDOUT_FACTOR = 2.0


@dataclass(frozen=True)
class Surface:
    """A parametric fit with its FLOP rule, so that it answers questions about budgets."""

    fit: ParametricFit
    rule: FlopRule

    def _optimum(self, c_flops: float) -> tuple[float, float, float]:
        n, d, loss = optimum(self.fit.theta[None], self.rule, c_flops)
        return float(n[0]), float(d[0]), float(loss[0])

    def n_opt(self, c_flops: float) -> float:
        return self._optimum(c_flops)[0]

    def d_opt(self, c_flops: float) -> float:
        return self._optimum(c_flops)[1]

    def loss_opt(self, c_flops: float) -> float:
        return self._optimum(c_flops)[2]

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> float:
        return float(self.fit.loss(n_params, d_tokens))


@dataclass(frozen=True)
class Decision:
    """What a fit says about one target budget, with 95% intervals.

    Attributes:
        budget: FLOPs. n_opt: parameters. d_opt: tokens. loss: nats per token at the optimum.
        n_interval, d_interval: bootstrap. loss_interval: bootstrap of a run's loss, widened by the holdout error.
        holdout_error: relative error taken into loss_interval.
    """

    budget: float
    n_opt: float
    d_opt: float
    loss: float
    n_interval: Interval
    d_interval: Interval
    loss_interval: Interval
    holdout_error: float


@dataclass(frozen=True)
class Result:
    """One approach on one table, with everything needed to judge it.

    Attributes:
        approach: `isoflop` or `parametric`.
        a, b: exponents of N* and D* in C, with intervals a_interval, b_interval.
        e: irreducible loss of the fit, nats per token; 0 where the form has none.
        e_interval: its interval; NaN where the form has none.
        model: the fit itself (answers n_opt, d_opt, loss_opt, loss_at).
        replicates: the bootstrap; None when no interval was asked for or could be made.
        holdout: leave-last-budget-out errors.
        decisions: one per target budget.
        budgets: [budgets] FLOPs of the table.
        flags: what limits this fit, in words.
    """

    approach: str
    a: float
    b: float
    a_interval: Interval
    b_interval: Interval
    e: float
    e_interval: Interval
    model: IsoFlopFit | Surface
    replicates: IsoFlopReplicates | ParametricReplicates | None
    holdout: Holdout
    decisions: tuple[Decision, ...]
    flags: tuple[str, ...]
    budgets: Array

    def forecast_interval(self, n_params: float, d_tokens: float, c_flops: float, seed: int = 0) -> Interval:
        """95% interval of the loss one planned run will measure.

        Bootstrap of the fitted loss at (N, D), plus the noise of a single run, then widened in quadrature by twice
        the relative holdout error at that distance from the grid.
        """
        if self.replicates is None:
            return NO_INTERVAL
        loss = self.replicates.loss_at(n_params, d_tokens, c_flops)
        noise = np.random.default_rng(seed + 1).standard_normal(len(loss)) * self.replicates.noise_sd
        drawn = interval(loss * np.exp(noise))
        centre = self.model.loss_at(n_params, d_tokens, c_flops)
        error = self.holdout.error_at(c_flops, self.budgets)
        return widen(drawn, centre, 0.0 if np.isnan(error) else HOLDOUT_FACTOR * error * centre)


@dataclass(frozen=True)
class Analysis:
    """Every approach asked for.

    Attributes:
        table: the runs, and those excluded with reasons.
        results: by approach. refused: reason by approach that gave no answer.
        minima: IsoFLOP curves, also where approach 2 as a whole is refused.
        verdict: one line: do the approaches agree, and which predicts held-out budgets better.
    """

    table: RunTable
    results: dict[str, Result]
    refused: dict[str, str]
    minima: tuple[Minimum, ...]
    verdict: str

    @property
    def best(self) -> Result:
        """The approach with the smallest holdout error and no flags; flagged ones only if nothing else is left.

        Raises:
            FitError: every approach was refused.
        """
        if not self.results:
            raise FitError("no approach gave an answer: " + "; ".join(f"{k}: {v}" for k, v in self.refused.items()))
        return min(self.results.values(), key=_preference)


NO_INTERVAL = Interval(float("nan"), float("nan"))


def widen(drawn: Interval, centre: float, amount: float) -> Interval:
    """Adds `amount` in quadrature to both half-widths around `centre`."""
    low = np.hypot(max(centre - drawn.low, 0.0), amount)
    high = np.hypot(max(drawn.high - centre, 0.0), amount)
    return Interval(centre - float(low), centre + float(high))


def analyse(
    table: RunTable,
    approaches: Sequence[str] = APPROACHES,
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
        budgets: target FLOPs to decide for.
        bootstrap: replicates; 0 gives no intervals.
        near: points per parabola of approach 2; None takes all.
        max_excess: approach 3 leaves out runs whose loss is further (relative) above their budget's lowest.
        noise_sd: known sd of ln loss of one run; None estimates it.

    Raises:
        ValueError: unknown approach.
    """
    unknown = [name for name in approaches if name not in APPROACHES]
    if unknown:
        raise ValueError(f"unknown approach {unknown[0]!r}; choose from {', '.join(APPROACHES)} or all")
    if len(table) == 0:
        return Analysis(table, {}, dict.fromkeys(approaches, "no usable runs in the table"), (), "no runs")
    minima = _minima(table, near)
    results: dict[str, Result] = {}
    refused: dict[str, str] = {}
    for name in approaches:
        try:
            if name == "isoflop":
                results[name] = _isoflop(table, minima, budgets, bootstrap, seed, near, loss_form, noise_sd)
            else:
                results[name] = _parametric(table, minima, budgets, bootstrap, seed, max_excess)
        except FitError as error:
            refused[name] = str(error)
    return Analysis(table, results, refused, minima, _verdict(results, refused))


def _minima(table: RunTable, near: int | None) -> tuple[Minimum, ...]:
    try:
        return fit_isoflop(table, near, "power").minima
    except FitError:
        return ()


def _isoflop(
    table: RunTable,
    minima: tuple[Minimum, ...],
    budgets: Sequence[float],
    bootstrap: int,
    seed: int,
    near: int | None,
    loss_form: str,
    noise_sd: float | None,
) -> Result:
    fit = fit_isoflop(table, near, loss_form)
    flags = [f"{m.budget:.3g} FLOPs refused: {m.reason}" for m in fit.minima if not m.ok]
    if len([m for m in fit.minima if m.ok]) < 3:
        flags.append("2 minima: the exponent has no residual to judge it by")
    replicates = None
    if bootstrap:
        try:
            replicates = bootstrap_isoflop(table, fit, bootstrap, seed, noise_sd=noise_sd)
        except FitError as error:
            flags.append(f"no intervals: {error}")
    holdout = rolling(table, minima, lambda part: fit_isoflop(part, near, loss_form))
    e_values = None
    if fit.loss_law.form == "saturating" and replicates is not None:
        e_values = replicates.loss_e
    e = fit.loss_law.e
    return _result("isoflop", table, fit, fit.a, fit.b, e, e_values, replicates, holdout, budgets, flags, seed)


def _parametric(
    table: RunTable,
    minima: tuple[Minimum, ...],
    budgets: Sequence[float],
    bootstrap: int,
    seed: int,
    max_excess: float | None,
) -> Result:
    def used(part: RunTable) -> RunTable:
        return part if max_excess is None else part.near_minimum(max_excess)

    rows = used(table)
    surface = Surface(fit_parametric(rows, seed=seed), flop_rule(rows))
    replicates = None
    if bootstrap:
        replicates = bootstrap_parametric(rows, surface.fit, surface.rule, bootstrap, seed)
    refit: Callable[[RunTable], Predictor] = lambda part: Surface(  # noqa: E731
        fit_parametric(used(part), seed=seed), flop_rule(used(part))
    )
    holdout = _no_holdout() if any(r.budget is None for r in table.runs) else rolling(table, minima, refit)
    fit = surface.fit
    flags = list(fit.flags)
    if len(rows) < len(table):
        flags.append(f"{len(table) - len(rows)} runs more than {max_excess:.0%} above their budget's lowest left out")
    e_values = replicates.e if replicates is not None else None
    return _result(
        "parametric", table, surface, fit.a, fit.b, fit.e, e_values, replicates, holdout, budgets, flags, seed
    )


def _no_holdout() -> Holdout:
    return Holdout((), "the table has no budget column")


def _result(
    approach: str,
    table: RunTable,
    model: IsoFlopFit | Surface,
    a: float,
    b: float,
    e: float,
    e_values: np.ndarray | None,
    replicates: IsoFlopReplicates | ParametricReplicates | None,
    holdout: Holdout,
    budgets: Sequence[float],
    flags: list[str],
    seed: int,
) -> Result:
    if replicates is not None and replicates.failed:
        flags.append(f"{replicates.failed} of {len(replicates.a)} bootstrap replicates refused")
    if holdout.reason:
        flags.append(f"holdout: {holdout.reason}")
    result = Result(
        approach=approach,
        a=a,
        b=b,
        a_interval=NO_INTERVAL if replicates is None else interval(replicates.a),
        b_interval=NO_INTERVAL if replicates is None else interval(replicates.b),
        e=e,
        e_interval=NO_INTERVAL if e_values is None else interval(e_values),
        model=model,
        replicates=replicates,
        holdout=holdout,
        decisions=(),
        flags=tuple(flags),
        budgets=table.budgets,
    )
    decisions = tuple(_decide(result, float(c), seed) for c in budgets)
    return Result(**{**result.__dict__, "decisions": decisions})


def _decide(result: Result, budget: float, seed: int) -> Decision:
    model = result.model
    n, d, loss = model.n_opt(budget), model.d_opt(budget), model.loss_opt(budget)
    n_interval = d_interval = NO_INTERVAL
    if result.replicates is not None:
        n_values, d_values, _ = result.replicates.decision(budget)
        n_interval, d_interval = interval(n_values), interval(d_values)
    return Decision(
        budget, n, d, loss, n_interval, d_interval,
        result.forecast_interval(n, d, budget, seed), result.holdout.error_at(budget, result.budgets),
    )  # fmt: skip


def _preference(result: Result) -> tuple[bool, float, str]:
    error = result.holdout.relative_error
    serious = any("bound" in flag or "not positive" in flag or "not identified" in flag for flag in result.flags)
    return serious, float("inf") if np.isnan(error) else error, result.approach


def _verdict(results: dict[str, Result], refused: dict[str, str]) -> str:
    if not results:
        return "no approach gave an answer"
    if len(results) == 1:
        only = next(iter(results.values()))
        why = "the other was refused" if refused else "the other was not asked for"
        return f"only {only.approach} gave an answer ({why}); nothing to check it against"
    iso, par = results["isoflop"], results["parametric"]
    best = min(results.values(), key=_preference)
    smaller = f"{best.approach} is preferred (holdout error {best.holdout.relative_error:.1%})"
    inside = iso.a in par.a_interval and par.a in iso.a_interval
    overlap = iso.a_interval.low <= par.a_interval.high and par.a_interval.low <= iso.a_interval.high
    if inside:
        return f"approaches agree on the exponent of N* ({iso.a:.3f}, {par.a:.3f}); {smaller}"
    if overlap:
        return f"exponents of N* differ ({iso.a:.3f}, {par.a:.3f}) but intervals overlap; {smaller}"
    return f"approaches DISAGREE on the exponent of N* ({iso.a:.3f}, {par.a:.3f}); {smaller}"
