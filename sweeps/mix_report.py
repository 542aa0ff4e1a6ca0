"""A ranking of mixes: as text, as plain values for JSON, as a figure, and in MLflow."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lm.data.files import plain
from recipes.files import write_text
from recipes.paired import Difference
from sweeps.isoflop import SweepResult
from sweeps.mix_grid import MixSweep
from sweeps.mix_rank import MixRun, Ranked, Ranking

FIGURE, NUMBERS = "mix.png", "mix.json"


def ranking_text(ranking: Ranking) -> str:
    """The ranking as text: the mean first, then every source."""
    wide = max(len(row.mix) for row in ranking.rows) + 2
    counted = [f"{name} {weight:.3g}" for name, weight in ranking.weights.items() if weight > 0]
    lines = [
        f"bits per byte, mean over {', '.join(counted)}; differences to {ranking.first}, paired by seed",
        f"{'':<4}{'mix':<{wide}}{'seeds':>6}{'mean':>9}{'difference':>12}{'95% interval':>22}  verdict",
    ]
    for place, row in enumerate(ranking.rows, start=1):
        lines.append(
            f"{place:<4}{row.mix:<{wide}}{row.seeds:>6}{row.score:>9.4f}{_shown(row.difference):>34}  {row.word}"
        )
    lines += ["", f"{'':<4}{'mix':<{wide}}" + "".join(f"{name:>22}" for name in ranking.sources)]
    for row in ranking.rows:
        cells = "".join(f"{_by_source(row, name):>22}" for name in ranking.sources)
        lines.append(f"{'':<4}{row.mix:<{wide}}{cells}")
    lines += ["", noise_line(ranking)]
    lines += [f"{mix}: no finished run" for mix in ranking.unfinished]
    return "\n".join(lines)


def noise_line(ranking: Ranking) -> str:
    """What the intervals mean, or that there are none."""
    counts = [len(row.difference.by_seed) for row in ranking.rows if row.difference is not None]
    if not counts or max(counts) < 2:
        return "one seed: the noise of these differences is unknown, a small one means nothing; add seeds"
    return (
        "intervals: Student's t on the differences of one seed's two runs, each candidate for itself; they hold the"
        " noise of initial values, data order and validation windows, at this size and length alone"
    )


def _shown(difference: Difference | None) -> str:
    if difference is None:
        return ""
    ends = "" if math.isnan(difference.low) else f"({difference.low:+.4f}, {difference.high:+.4f})"
    return f"{difference.mean:+12.4f}{ends:>22}"


def _by_source(row: Ranked, name: str) -> str:
    found = row.by_source.get(name)
    return f"{row.bpb[name]:.4f}" + (f" ({found.mean:+.4f})" if found is not None else " " * 10)


def ranking_dict(ranking: Ranking, runs: Sequence[MixRun]) -> dict[str, Any]:
    """Plain values for JSON; NaN becomes None."""
    rows = [{**asdict(row), "verdict": row.word} for row in ranking.rows]
    return plain(
        {
            "first": ranking.first,
            "weights": dict(ranking.weights),
            "ranking": rows,
            "noise": noise_line(ranking),
            "unfinished": list(ranking.unfinished),
            "runs": [asdict(run) for run in runs],
        }
    )


def write_files(ranking: Ranking, runs: Sequence[MixRun], folder: Path) -> list[Path]:
    """Writes mix.png and mix.json; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_ranking(ranking, folder / FIGURE)
    write_text(folder / NUMBERS, json.dumps(ranking_dict(ranking, runs), indent=1) + "\n")
    return [folder / FIGURE, folder / NUMBERS]


def plot_ranking(ranking: Ranking, path: Path) -> None:
    """Differences to the first candidate, one panel for the mean and one a source: seeds, mean, interval."""
    from sweeps.plot_style import COLOURS, INK, figure, save_png

    rows = list(reversed(ranking.rows))  # the best on top
    panels = ["mean", *ranking.sources]
    drawn, axes = figure(len(panels), (2.2 + 2.6 * len(panels), 1.5 + 0.42 * len(rows)))
    for axis, name in zip(axes, panels, strict=True):
        axis.axvline(0, color=INK, lw=1)
        for place, row in enumerate(rows):
            if row.difference is None:
                axis.plot([0], [place], "D", ms=6, color=INK)  # the one that the others are held against
            found = row.difference if name == "mean" else row.by_source.get(name)
            if found is None or not found.by_seed:
                continue
            colour = COLOURS["isoflop"] if found.mean < 0 else COLOURS["parametric"]
            if not math.isnan(found.low):
                axis.plot([found.low, found.high], [place] * 2, "-", lw=6, alpha=0.3, color=colour)
            axis.plot([value for _, value in found.by_seed], [place] * len(found.by_seed), "o", ms=4, color=colour)
            axis.plot([found.mean], [place], "|", ms=13, mew=2, color=colour)
        axis.set_title(name if name != "mean" else "mean of sources", fontsize=10, color=INK)
        axis.set_yticks(range(len(rows)), [row.mix if axis is axes[0] else "" for row in rows], color=INK)
        axis.set_ylim(-0.6, len(rows) - 0.4)
        axis.margins(x=0.12)
        axis.locator_params(axis="x", nbins=4)
        axis.tick_params(labelsize=9)
    drawn.supxlabel(
        f"bits per byte less those of {ranking.first}, lower is better; dots: seeds, bars: 95% interval", fontsize=9
    )
    save_png(drawn, path)


def log_ranking(
    ranking: Ranking, runs: Sequence[MixRun], sweep: MixSweep, result: SweepResult, tracking_uri: str | None = None
) -> dict[str, str]:
    """Logs one MLflow run (kind `fit`, approach `mix`) a candidate, for the UI to compare; ids by candidate."""
    from sweeps.mlflow_fits import describe_fits
    from sweeps.mlflow_runs import KIND, log_run

    text, ids = ranking_text(ranking), {}
    with tempfile.TemporaryDirectory() as place:
        files = write_files(ranking, runs, Path(place))
        for row in ranking.rows:
            params = {
                "approach": "mix", "mix": row.mix, "weights": json.dumps(sweep.mixes[row.mix]), "n_runs": row.seeds,
                "verdict": row.word, "against": ranking.first, "anneal": sweep.anneal,
            }  # fmt: skip
            ids[row.mix] = log_run(
                result.experiment, f"mix-{row.mix}", {KIND: "fit"}, params, ranking_metrics(row), files,
                result.parent_run_id, tracking_uri, f"```\n{text}\n```",
            )  # fmt: skip
    describe_fits(result.experiment, list(ids.values()), text, tracking_uri)
    return ids


def ranking_metrics(row: Ranked) -> dict[str, float]:
    """Metrics of a candidate's run: bpb, bpb/SOURCE, and diff, diff_lo, diff_hi to the first candidate."""
    values = {"bpb": row.score, **{f"bpb/{name}": value for name, value in row.bpb.items()}}
    if row.difference is not None:
        values |= {"diff": row.difference.mean, "diff_lo": row.difference.low, "diff_hi": row.difference.high}
    return {name: value for name, value in values.items() if math.isfinite(value)}  # a SQL store makes NaN a 0
