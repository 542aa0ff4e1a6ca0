"""The approaches by name: what each one fits, how it is resampled, and what every fit must be able to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from sweeps.scaling.akima import AkimaFit, fit_akima
from sweeps.scaling.bootstrap_isoflop import akima_noise, bootstrap_akima, bootstrap_isoflop
from sweeps.scaling.bootstrap_lines import LineReplicates
from sweeps.scaling.bootstrap_parametric import ParametricReplicates, bootstrap_parametric
from sweeps.scaling.envelope import EnvelopeFit, bootstrap_envelope, fit_envelope
from sweeps.scaling.isoflop import NEAREST, IsoFlopFit, fit_isoflop
from sweeps.scaling.kaplan import KaplanFit, KaplanReplicates, bootstrap_kaplan, fit_kaplan
from sweeps.scaling.optimum import flop_rule
from sweeps.scaling.parametric import ParametricFit
from sweeps.scaling.surfaces import Surface
from sweeps.scaling.table import Array, FitError, RunTable
from sweeps.scaling.varpro import LinearProblem, fit_varpro
from sweeps.scaling.world import fit_once, flat_profile

# The median of a budget's noise replicates needs fewer than the published interval does.
AKIMA_REPLICATES = 200


class Model(Protocol):
    """What every fit answers. N in parameters, D in tokens, C in FLOPs, loss in nats per token.

    `a`, `b`: exponents of N* and D* in C. `e`: irreducible loss, 0 where the form has none. `flags`: what limits the
    fit, in words. `parameters`: its constants, for reports. `loss_at`: loss of a shape off the optimum.
    """

    @property
    def a(self) -> float: ...

    @property
    def b(self) -> float: ...

    @property
    def e(self) -> float: ...

    @property
    def flags(self) -> tuple[str, ...]: ...

    @property
    def parameters(self) -> dict[str, float | str]: ...

    def n_opt(self, c_flops: float) -> float: ...

    def d_opt(self, c_flops: float) -> float: ...

    def loss_opt(self, c_flops: float) -> float: ...

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> float: ...


class Replicates(Protocol):
    """Draws of a fit whose percentiles are its intervals, [k] fp64 each; NaN where the replicate was refused.

    `scheme` names how they were made; `failed` counts the refused; `e` is NaN where the form has none; `noise_sd` is
    the standard deviation of ln loss of a single run.
    """

    @property
    def scheme(self) -> str: ...

    @property
    def a(self) -> Array: ...

    @property
    def b(self) -> Array: ...

    @property
    def e(self) -> Array: ...

    @property
    def failed(self) -> int: ...

    @property
    def noise_sd(self) -> Array: ...

    def decision(self, c_flops: float) -> tuple[Array, Array, Array]: ...

    def loss_at(self, n_params: float, d_tokens: float, c_flops: float) -> Array: ...


@dataclass(frozen=True)
class FitOptions:
    """Choices that the approaches share; each takes what concerns it.

    Attributes:
        near: points per IsoFLOP curve nearest its lowest; None takes all.
        max_excess: surface fits leave out runs whose loss is further (relative) above their budget's lowest.
        loss_form: law of the loss at the optimum, see `laws.fit_loss_law`.
        noise_sd: known sd of ln loss of one run; None estimates it.
        seed: of starts and resampling.
    """

    near: int | None = NEAREST
    max_excess: float | None = None
    loss_form: str = "auto"
    noise_sd: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Approach:
    """One way from a run table to a decision.

    Attributes:
        name: as on the command line. title: as in reports.
        fit: (table, options) -> model; raises FitError where the table cannot support it.
        bootstrap: (table, model, replicates, seed, options) -> draws; raises FitError where the noise is not known.
        by_budget: it reads IsoFLOP curves, and groups runs by FLOPs where the table has no budget column.
    """

    name: str
    title: str
    fit: Callable[[RunTable, FitOptions], Model]
    bootstrap: Callable[[RunTable, Model, int, int, FitOptions], Replicates]
    by_budget: bool = False


def _envelope(table: RunTable, options: FitOptions) -> EnvelopeFit:
    return fit_envelope(table, options.loss_form)


def _envelope_draws(table: RunTable, model: Model, k: int, seed: int, options: FitOptions) -> LineReplicates:
    assert isinstance(model, EnvelopeFit)
    return bootstrap_envelope(table, model, k, seed, options.noise_sd)


def _isoflop(table: RunTable, options: FitOptions) -> IsoFlopFit:
    return fit_isoflop(table, options.near, options.loss_form)


def _isoflop_draws(table: RunTable, model: Model, k: int, seed: int, options: FitOptions) -> LineReplicates:
    assert isinstance(model, IsoFlopFit)
    return bootstrap_isoflop(table, model, k, seed, noise_sd=options.noise_sd)


def _akima(table: RunTable, options: FitOptions) -> AkimaFit:
    return fit_akima(table, akima_noise(table, options.noise_sd), AKIMA_REPLICATES, options.seed, options.loss_form)


def _akima_draws(table: RunTable, model: Model, k: int, seed: int, options: FitOptions) -> LineReplicates:
    assert isinstance(model, AkimaFit)
    return bootstrap_akima(table, model, k, seed, options.noise_sd)


def near_rows(table: RunTable, options: FitOptions) -> RunTable:
    """The rows a surface is fitted to: all, or those within `max_excess` of their budget's lowest loss."""
    return table if options.max_excess is None else table.near_minimum(options.max_excess)


def _left_out(table: RunTable, rows: RunTable, options: FitOptions) -> str:
    gone = len(table) - len(rows)
    return f"{gone} runs more than {options.max_excess:.0%} above their budget's lowest left out" if gone else ""


def _surface(table: RunTable, rows: RunTable, fit: ParametricFit, options: FitOptions) -> Surface:
    """The surface of some of a table's rows, refused where they do not identify its exponents."""
    if not fit.flags and (reason := flat_profile(rows, fit)):
        raise FitError(reason)
    return Surface(fit, flop_rule(rows), _left_out(table, rows, options))


def _parametric(table: RunTable, options: FitOptions) -> Surface:
    rows = near_rows(table, options)
    return _surface(table, rows, fit_once(rows, options.seed), options)


def _linear(table: RunTable, options: FitOptions) -> Surface:
    rows = near_rows(table, options)
    return _surface(table, rows, fit_varpro(rows), options)


def _linear_draws(table: RunTable, model: Model, k: int, seed: int, options: FitOptions) -> ParametricReplicates:
    assert isinstance(model, Surface)
    return bootstrap_parametric(near_rows(table, options), model.fit, model.rule, k, seed, kind=LinearProblem)


def _kaplan(table: RunTable, options: FitOptions) -> KaplanFit:
    rows = near_rows(table, options)
    fit, left_out = fit_kaplan(rows, seed=options.seed), _left_out(table, rows, options)
    return replace(fit, flags=(*fit.flags, left_out)) if left_out else fit


def _kaplan_draws(table: RunTable, model: Model, k: int, seed: int, options: FitOptions) -> KaplanReplicates:
    assert isinstance(model, KaplanFit)
    return bootstrap_kaplan(near_rows(table, options), model, k, seed)


def _parametric_draws(table: RunTable, model: Model, k: int, seed: int, options: FitOptions) -> ParametricReplicates:
    assert isinstance(model, Surface)
    return bootstrap_parametric(near_rows(table, options), model.fit, model.rule, k, seed)


APPROACHES: dict[str, Approach] = {
    approach.name: approach
    for approach in (
        Approach("envelope", "Approach 1: lower envelope of the runs", _envelope, _envelope_draws, True),
        Approach("isoflop", "Approach 2: IsoFLOP parabolas", _isoflop, _isoflop_draws, True),
        Approach("isoflop_akima", "Approach 2: IsoFLOP splines", _akima, _akima_draws, True),
        Approach("parametric", "Approach 3: parametric surface, Huber on ln loss", _parametric, _parametric_draws),
        Approach("parametric_linear", "Parametric surface, Huber on the loss itself", _linear, _linear_draws),
        Approach("kaplan", "Kaplan's form, no irreducible loss", _kaplan, _kaplan_draws),
    )
}
