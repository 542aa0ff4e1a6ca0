"""Loss against learning rate by width, one panel a parametrisation, minima marked with their intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.scaling.lr_curve import COMPLETE
from sweeps.scaling.lr_optimum import Optimum
from sweeps.scaling.lr_transfer import LrAnalysis, Trend

TITLES = {"mup": "muP", "standard": "standard parametrisation"}
X_LABELS = {"mup": "peak learning rate, of muP's base width", "standard": "peak learning rate, of all parameters"}
MARKS = "os^Dv"  # one a batch size
HEADROOM = 1.5  # losses further above the lowest than so many times the highest vertex's distance are cut off


def plot_lr(analysis: LrAnalysis, path: Path) -> None:
    """Writes the figure as png."""
    from matplotlib.figure import Figure

    params = sorted({o.param for o in analysis.optima})
    figure = Figure(figsize=(6.2 * len(params), 5.0), layout="constrained")
    axes: Any = figure.subplots(1, len(params), sharey=True, squeeze=False)[0]
    widths = sorted({o.width for o in analysis.optima})
    batches = sorted({o.batch_tokens for o in analysis.optima})
    top = _top(analysis)
    rates = sorted({run.lr for run in analysis.runs})
    for axis, param in zip(axes, params, strict=True):
        for o in (o for o in analysis.optima if o.param == param):
            mark = MARKS[batches.index(o.batch_tokens) % len(MARKS)]
            label = f"width {o.width}" + (f", batch {o.batch_tokens}" if len(batches) > 1 else "")
            _curve(axis, analysis, o, _colour(widths.index(o.width), len(widths)), mark, label, top)
        _finish(axis, param, [t for t in analysis.trends if t.param == param], rates)
    axes[0].set_ylabel("validation loss, nats per token")
    low = min((run.loss for run in analysis.runs if math.isfinite(run.loss)), default=0.0)
    axes[0].set_ylim(low - 0.06 * (top - low), top)
    figure.savefig(path, dpi=130)


def _top(analysis: LrAnalysis) -> float:
    """Upper end of the loss axis: one bad rate must not press all curves flat."""
    losses = np.array([run.loss for run in analysis.runs if run.status == COMPLETE and math.isfinite(run.loss)])
    if len(losses) == 0:
        return 1.0
    fitted = [o.at(np.array([min(o.used), max(o.used)])).max() for o in analysis.optima if o.ok]
    low = losses.min()
    wanted = max([*fitted, *(o.loss for o in analysis.optima if o.ok), float(np.percentile(losses, 75))])
    return float(min(losses.max() + 0.04 * (losses.max() - low), low + HEADROOM * (wanted - low)) + 1e-9)


def _curve(axis: Any, analysis: LrAnalysis, o: Optimum, colour: Any, mark: str, label: str, top: float) -> None:
    mine = (o.param, o.width, o.batch_tokens)
    runs = [run for run in analysis.runs if (run.param, run.width, run.batch_tokens) == mine]
    whole = [run for run in runs if run.status == COMPLETE and math.isfinite(run.loss)]
    rates = sorted({run.lr for run in whole})
    means = [float(np.mean([run.loss for run in whole if run.lr == lr])) for lr in rates]
    axis.plot([run.lr for run in whole], [run.loss for run in whole], mark, ms=5, color=colour, ls="none", zorder=3)
    axis.plot(rates, means, ":", lw=1.1, color=colour, zorder=2)
    gone = sorted({run.lr for run in runs if run.status not in (COMPLETE, "missing")})
    (crosses,) = axis.plot(gone, [top] * len(gone), "x", ms=6, color=colour, clip_on=False, zorder=3)
    crosses.set_in_layout(False)  # an artist outside the axes would squeeze them
    if not o.ok:
        axis.plot([], [], ":", marker=mark, ms=5, lw=1.1, color=colour, label=f"{label}: no optimum")
        return
    x = np.geomspace(min(o.used) * 0.9, max(o.used) * 1.1, 80)
    axis.plot(x, o.at(x), "-", lw=1.8, color=colour, zorder=2)
    if math.isfinite(o.low):
        axis.plot([o.low, o.high], [o.loss] * 2, "-", lw=5, alpha=0.3, color=colour, solid_capstyle="butt", zorder=4)
    axis.plot([o.lr], [o.loss], "*", ms=13, mfc=colour, mec="black", mew=0.9, ls="none", zorder=5)
    axis.plot([], [], "-", marker=mark, ms=5, lw=1.8, color=colour, label=f"{label}: {o.lr:.1e}")


def _finish(axis: Any, param: str, trends: list[Trend], rates: list[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:.3g}" for rate in rates], fontsize=9)
    axis.minorticks_off()
    axis.set_xlabel(X_LABELS.get(param, "peak learning rate"))
    lines = [TITLES.get(param, param)]
    for trend in trends:
        if math.isfinite(trend.slope):
            ends = f" ({trend.low:+.2f} to {trend.high:+.2f})" if math.isfinite(trend.low) else ""
            batch = f"batch {trend.batch_tokens}: " if len(trends) > 1 else ""
            lines.append(f"{batch}LR* ~ width^{trend.slope:+.2f}{ends}")
    axis.set_title("\n".join(lines), fontsize=10)
    axis.grid(True, which="major", color="0.9", lw=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, frameon=False, title="best rate", title_fontsize=9, loc="upper center")


def _colour(index: int, count: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](0.05 + 0.8 * index / max(count - 1, 1))
