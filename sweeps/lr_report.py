"""What a learning-rate sweep found: as text, as plain values for JSON, and in MLflow."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm.data.files import plain
from recipes.files import write_text
from sweeps.lr_plot import plot_lr
from sweeps.scaling.lr_curve import LrRun
from sweeps.scaling.lr_optimum import Optimum
from sweeps.scaling.lr_transfer import MOVES, OPEN, SHIFTS, STAYS, LrAnalysis, Trend

NAMES = {"mup": "muP", "standard": "standard"}
FIGURE, NUMBERS = "mup_lr.png", "mup_lr.json"


def lr_runs(rows: Sequence[Mapping[str, Any]]) -> list[LrRun]:
    """Rows of sweeps.mup_lr.run_lr_sweep as runs."""
    return [
        LrRun(
            row["param"],
            row["d_model"],
            row["global_batch_tokens"],
            row["lr"],
            row["seed"],
            math.nan if row["val_loss"] is None else row["val_loss"],
            row["status"],
        )
        for row in rows
    ]


def run_name(run: LrRun) -> str:
    """Short name for people."""
    return f"{run.param}-d{run.width}-{run.batch_tokens}tokens-lr{run.lr:.1e}-s{run.seed}"


def lr_text(analysis: LrAnalysis) -> str:
    """Everything the fit found, as text."""
    lines = [f"{'':<10}{'batch':>7}{'width':>7}{'LR*':>11}{'95% interval':>22}{'loss':>9}{'best tried':>12}"]
    for o in analysis.optima:
        head = f"{NAMES.get(o.param, o.param):<10}{o.batch_tokens:>7}{o.width:>7}"
        if not o.ok:
            lines.append(f"{head}  refused: {o.reason}")
            continue
        ends = f"({o.low:.2e}, {o.high:.2e})" if math.isfinite(o.low) else "no interval"
        lines.append(f"{head}{o.lr:>11.2e}{ends:>22}{o.loss:>9.4f}{o.best_lr:>12.2e}")
    lines.append(_noise(analysis))
    lines += verdict(analysis)
    lines += [f"not used: {run_name(run)}: {why}" for run, why in analysis.excluded]
    return "\n".join(lines)


def _noise(analysis: LrAnalysis) -> str:
    fit = f"parabolas through {analysis.near} rates"
    if analysis.noise is None:
        return f"{fit}; no intervals: one seed and no rate beyond the three of a parabola, so nothing shows the noise"
    noise = analysis.noise
    dof = "" if noise.source == "given" else f", {noise.dof} degrees of freedom"
    return f"{fit}; noise of ln loss {noise.sd:.2g} ({noise.source}{dof}); {analysis.replicates} bootstrap replicates"


def verdict(analysis: LrAnalysis) -> list[str]:
    """One line for each parametrisation and batch: whether the best rate moved over the widths."""
    several = len({trend.batch_tokens for trend in analysis.trends}) > 1
    return [_sentence(trend, analysis.grid_step, several) for trend in analysis.trends]


def _sentence(t: Trend, step: float, name_batch: bool) -> str:
    head = NAMES.get(t.param, t.param) + (f", batch {t.batch_tokens} tokens" if name_batch else "") + ": "
    edges = "; ".join(f"at width {width} it is at the {edge} end of the rates" for width, edge in t.edges.items())
    if len(t.widths) < 2:
        return f"{head}not decided, {len(t.widths)} width(s) with an optimum" + (f"; {edges}" if edges else "")
    within = f"{'within' if t.spread <= step else 'more than'} one step of the grid ({step:g}x)"
    interval = f" ({t.low:+.2f} to {t.high:+.2f})" if math.isfinite(t.low) else ""
    text = {
        STAYS: "the best rate stays",
        SHIFTS: "the best rate moves, by less than a step of the grid",
        MOVES: "the best rate moves",
        OPEN: "not decided whether the best rate moves",
    }[t.word]
    return (
        f"{head}{text}: largest over smallest {t.spread:.2f} over widths {t.widths[0]} to {t.widths[-1]}, {within};"
        f" slope of ln LR* over ln width {t.slope:+.2f}{interval}" + (f"; {edges}" if edges else "")
    )


def lr_dict(analysis: LrAnalysis) -> dict[str, Any]:
    """Plain values for JSON; NaN becomes None."""
    optima = [{key: value for key, value in vars(o).items() if key != "samples"} for o in analysis.optima]
    return plain(
        {
            "verdict": verdict(analysis),
            "trends": [asdict(trend) for trend in analysis.trends],
            "optima": optima,
            "noise": None if analysis.noise is None else asdict(analysis.noise),
            "grid_step": analysis.grid_step,
            "near": analysis.near,
            "replicates": analysis.replicates,
            "runs": [asdict(run) for run in analysis.runs],
            "excluded": [[run_name(run), why] for run, why in analysis.excluded],
        }
    )


def write_files(analysis: LrAnalysis, folder: Path) -> list[Path]:
    """Writes mup_lr.png and mup_lr.json; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_lr(analysis, folder / FIGURE)
    write_text(folder / NUMBERS, json.dumps(lr_dict(analysis), indent=1) + "\n")
    return [folder / FIGURE, folder / NUMBERS]


def log_lr_fit(
    analysis: LrAnalysis, experiment: str, parent_run_id: str, tracking_uri: str | None = None
) -> dict[str, str]:
    """Logs one MLflow run (kind `fit`) a parametrisation and batch, for the UI to compare; ids by run name."""
    from sweeps.mlflow_fits import describe_fits
    from sweeps.mlflow_runs import KIND, log_run

    ids: dict[str, str] = {}
    text = lr_text(analysis)
    with tempfile.TemporaryDirectory() as place:
        files = write_files(analysis, Path(place))
        for trend in analysis.trends:
            name = f"fit-lr-{trend.param}-{trend.batch_tokens}"
            ids[name] = log_run(
                experiment, name, {KIND: "fit"}, fit_params(analysis, trend), fit_metrics(analysis, trend), files,
                parent_run_id, tracking_uri, f"```\n{text}\n```",
            )  # fmt: skip
    describe_fits(experiment, list(ids.values()), text, tracking_uri)
    return ids


def fit_params(analysis: LrAnalysis, trend: Trend) -> dict[str, object]:
    """Params of a trend's fit run."""
    mine = [run for run in analysis.runs if (run.param, run.batch_tokens) == (trend.param, trend.batch_tokens)]
    left = [run for run, _ in analysis.excluded if (run.param, run.batch_tokens) == (trend.param, trend.batch_tokens)]
    return {
        "approach": "lr_quadratic",
        "param": trend.param,
        "batch_tokens": trend.batch_tokens,
        "widths": " ".join(str(o.width) for o in _of(analysis, trend)),
        "n_runs": len(mine) - len(left),
        "n_excluded": len(left),
        "scheme": "noise" if analysis.noise else "none",
        "bootstrap": analysis.replicates,
        "near": analysis.near,
        "flags": "; ".join(f"width {o.width}: {o.reason}" for o in _of(analysis, trend) if not o.ok) or "none",
        "verdict": trend.word,
    }


def fit_metrics(analysis: LrAnalysis, trend: Trend) -> dict[str, float]:
    """Metrics of a trend's fit run: lr_opt (of the widest curve with one), lr_opt_WIDTH, ends _lo and _hi, slope."""
    values = {"slope": trend.slope, "slope_lo": trend.low, "slope_hi": trend.high, "spread": trend.spread}
    for o in _of(analysis, trend):
        ends = {f"lr_opt_{o.width}": o.lr, f"lr_lo_{o.width}": o.low, f"lr_hi_{o.width}": o.high}
        values |= ends
        if o.ok:
            values |= {"lr_opt": o.lr, "lr_lo": o.low, "lr_hi": o.high, "loss_pred": o.loss}
    if analysis.noise:
        values["noise_sd"] = analysis.noise.sd
    return {key: value for key, value in values.items() if math.isfinite(value)}  # a SQL store makes NaN a 0


def _of(analysis: LrAnalysis, trend: Trend) -> list[Optimum]:
    return [o for o in analysis.optima if (o.param, o.batch_tokens) == (trend.param, trend.batch_tokens)]
