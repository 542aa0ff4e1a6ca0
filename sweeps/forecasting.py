"""What a planned run should reach, from a fit of smaller runs: size, tokens and loss with a 95% interval."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lm.config import ModelConfig
from lm.plan import DEFAULT_FLOP_CONVENTION, n_params, steps_for_budget, tokens_for_budget, training_flops
from sweeps.fit_report import FitReport, quantity
from sweeps.parsing import read_yaml
from sweeps.scaling.analysis import NOTE, Result
from sweeps.scaling.decided import size_intervals
from sweeps.scaling.table import RunTable

FAR_FROM_OPTIMUM = 1.5
# A planned run's FLOPs are at most this share off its budget.
OFF_BUDGET = 0.1
# A target further than this many times beyond the swept budgets gets a note.
FAR_BEYOND = 30.0


@dataclass(frozen=True)
class Forecast:
    """A prediction, fixed before the run.

    Attributes:
        forecast_id: see `forecast_id`; also the tag `scalewright.forecast_id` of both MLflow runs, the forecast's and
            the training run's.
        approach: the fit it stands on.
        budget: target FLOPs. n_opt, d_opt: the fit's optimum there, parameters and tokens.
        model: the planned shape; None when no candidates were given (then N and D are the optimum's).
        n_params, d_tokens, c_flops: of the planned run, under the conventions named.
        loss, loss_lo, loss_hi: predicted at (n_params, d_tokens), nats per token, 95%.
        holdout_err: relative error that those on held-out budgets make one expect there.
        flags: what to know before trusting it.
        mlflow_run_id: where it is written down; empty before.
        n_lo, n_hi, d_lo, d_hi: 95% intervals of n_opt and d_opt; NaN without, and in forecasts of earlier versions.
        widened: half-width, relative to the loss, that the held-out errors added. NaN in forecasts of earlier
            versions.
    """

    forecast_id: str
    approach: str
    budget: float
    n_opt: float
    d_opt: float
    model: ModelConfig | None
    n_params: float
    d_tokens: float
    c_flops: float
    loss: float
    loss_lo: float
    loss_hi: float
    holdout_err: float
    flops_convention: str
    n_convention: str
    flags: tuple[str, ...] = ()
    mlflow_run_id: str = ""
    widened: float = math.nan
    n_lo: float = math.nan
    n_hi: float = math.nan
    d_lo: float = math.nan
    d_hi: float = math.nan

    def text(self) -> str:
        """A few lines for people."""
        shape = self.model
        at = f", shape d_model {shape.d_model}, n_layers {shape.n_layers}, n_heads {shape.n_heads}" if shape else ""
        ends = f"95% interval [{self.loss_lo:.3f}, {self.loss_hi:.3f}]"
        lines = [
            f"forecast {self.forecast_id} by {self.approach} for {self.budget:.3g} FLOPs ({self.flops_convention})",
            f"  optimum: N* {_ends(self.n_opt, self.n_lo, self.n_hi)} parameters, "
            f"D* {_ends(self.d_opt, self.d_lo, self.d_hi)} tokens",
            f"  planned: N {quantity(self.n_params)}, D {quantity(self.d_tokens)}, {self.c_flops:.4g} FLOPs{at}",
            f"  loss {self.loss:.3f} nats per token, "
            + ("no interval" if math.isnan(self.loss_lo) else f"{ends} ({self._holdout()})"),
        ]
        return "\n".join([*lines, *(f"  note: {flag}" for flag in self.flags), f"  {NOTE}"])

    def _holdout(self) -> str:
        if math.isnan(self.holdout_err):
            return "no budget could be held out: noise alone"
        if math.isnan(self.widened):
            return f"holdout error {self.holdout_err:.1%}"
        return f"widened by {self.widened:.1%} for how far held-out budgets were missed"


def nearest_shape(candidates: Sequence[ModelConfig], n_opt: float, convention: str = "matmul") -> ModelConfig:
    """The candidate whose N is nearest to N* in ln N.

    Raises:
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("no candidate shapes to choose from; give at least one")
    return min(candidates, key=lambda config: abs(math.log(n_params(config, convention) / n_opt)))


def make_forecast(
    report: FitReport,
    budget: float,
    candidates: Sequence[ModelConfig] = (),
    sequence_length: int | None = None,
    global_batch_tokens: int | None = None,
    approach: str | None = None,
    flops_convention: str | None = None,
    n_convention: str | None = None,
) -> Forecast:
    """Chooses the run for a budget and predicts its loss at its own N and D.

    Args:
        report: the fit. budget: FLOPs.
        candidates: shapes that could be trained; empty predicts at the optimum itself.
        sequence_length: tokens; needed with candidates, to count their FLOPs.
        global_batch_tokens: rounds D to whole steps; None leaves it exact.
        approach: which fit; None takes the preferred one.
        flops_convention, n_convention: of `lm.plan`; None takes the table's if `lm.plan` knows it, else the defaults.

    Raises:
        ValueError: candidates without a sequence length, an approach the report lacks, a budget that is not positive.
    """
    if not budget > 0:
        raise ValueError(f"budget must be positive, got {budget}")
    if approach is not None and approach not in report.analysis.results:
        reason = report.analysis.refused.get(approach, "it was not fitted")
        raise ValueError(f"no {approach} fit to forecast from: {reason}")
    result = report.analysis.results[approach] if approach else report.best
    table = report.analysis.table
    flops_name = flops_convention or _known(table.convention, DEFAULT_FLOP_CONVENTION)
    n_name = n_convention or _known(table.n_convention, "matmul")
    n_opt, d_opt = result.model.n_opt(budget), result.model.d_opt(budget)
    flags = list(result.flags)
    model, n, d, c = None, n_opt, d_opt, budget
    if candidates:
        if sequence_length is None:
            raise ValueError("candidate shapes need sequence_length, to count their FLOPs")
        model = nearest_shape(candidates, n_opt, n_name)
        n = float(n_params(model, n_name))
        d = _tokens(model, budget, sequence_length, global_batch_tokens, flops_name)
        c = training_flops(model, d, sequence_length, flops_name)
        if abs(c / budget - 1) > OFF_BUDGET:
            raise ValueError(
                f"whole steps of {global_batch_tokens:,} tokens make a run of {c:.3g} FLOPs, not {budget:.3g}: give a"
                " smaller --global-batch-tokens"
            )
        if max(n / n_opt, n_opt / n) > FAR_FROM_OPTIMUM:
            flags.append(f"the nearest shape is {n / n_opt:.2g} times N*; add shapes nearer to {quantity(n_opt)}")
    flags += _far_from_grid(c, result)
    loss = result.model.loss_at(n, d, c)
    ends = result.forecast_interval(n, d, c)
    n_ends, d_ends = size_intervals(report.analysis, result, budget)
    error = result.holdout.error_at(c, result.budgets)
    identity = forecast_id(table, result.approach, budget, model, d, (flops_name, n_name))
    return Forecast(
        identity, result.approach, budget, n_opt, d_opt, model, n, d, c, loss, ends.low, ends.high,
        error, flops_name, n_name, tuple(flags), widened=result.holdout.widening(c, result.budgets),
        n_lo=n_ends.low, n_hi=n_ends.high, d_lo=d_ends.low, d_hi=d_ends.high,
    )  # fmt: skip


def _far_from_grid(c_flops: float, result: Result) -> list[str]:
    """A note where the interval speaks of budgets that nothing has tested it at."""
    low, high = float(result.budgets.min()), float(result.budgets.max())
    if c_flops > FAR_BEYOND * high:
        return [
            f"{c_flops / high:.3g} times the largest swept budget: the intervals were tested at 10 times; sweep nearer"
        ]
    if c_flops < low / FAR_BEYOND:
        return [f"{low / c_flops:.3g} times below the smallest swept budget: nothing tests the form there"]
    return []


def forecast_id(
    table: RunTable, approach: str, budget: float, model: ModelConfig | None, d_tokens: float, names: tuple[str, str]
) -> str:
    """12 hex digits over what a forecast is made from: the runs and their losses, the approach, the planned run."""
    rows = sorted((r.run, r.n_params, r.d_tokens, r.c_flops, r.loss) for r in table.runs)
    plan = [asdict(model), d_tokens] if model else None
    content = json.dumps([rows, approach, budget, plan, names], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _ends(value: float, low: float, high: float) -> str:
    ends = "" if math.isnan(low) else f" [{quantity(low)}, {quantity(high)}]"
    return quantity(value) + ends


def _known(convention: str, default: str) -> str:
    from lm.plan import FLOP_CONVENTIONS, PARAMETER_CONVENTIONS

    return convention if convention in FLOP_CONVENTIONS or convention in PARAMETER_CONVENTIONS else default


def _tokens(
    model: ModelConfig, budget: float, sequence_length: int, global_batch_tokens: int | None, convention: str
) -> float:
    if global_batch_tokens is None:
        return tokens_for_budget(model, budget, sequence_length, convention)
    steps = steps_for_budget(model, budget, sequence_length, global_batch_tokens, convention)
    return float(steps * global_batch_tokens)


def read_shapes(path: Path) -> list[ModelConfig]:
    """Candidate shapes from YAML: a list of `lm.config.ModelConfig` arguments.

    Raises:
        ValueError: missing file, not a list, or arguments that make no model.
    """
    if not path.is_file():
        raise ValueError(f"no file {path}; give a YAML list of model shapes")
    items = read_yaml(path)
    if not (isinstance(items, list) and items and all(isinstance(item, dict) for item in items)):
        raise ValueError(f"{path} must hold a list of shapes (vocab_size, d_model, n_layers, n_heads, ...)")
    try:
        return [ModelConfig(**item) for item in items]
    except TypeError as error:
        raise ValueError(f"{path}: a shape cannot be read: {error}") from None
