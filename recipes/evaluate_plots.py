"""Figures of an evaluation: accuracy by length and depth, loss by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm.evaluation.probes import ProbeScore


def heat_maps(scores: Sequence[ProbeScore], path: Path) -> Path:
    """One map a task: exact match by length (across) and depth (down), the number in each cell."""
    tasks = list(dict.fromkeys(score.task for score in scores))
    figure, axes = _figure(len(tasks), (3.6, 3.4))
    for axis, task in zip(axes, tasks, strict=True):
        cells = {(s.length, s.depth): s.exact_match for s in scores if s.task == task}
        lengths, depths = sorted({key[0] for key in cells}), sorted({key[1] for key in cells})
        axis.imshow(
            [[cells[length, depth] for length in lengths] for depth in depths],
            vmin=0,
            vmax=1,
            cmap="cividis",
            aspect="auto",
        )
        for (length, depth), value in cells.items():
            colour = "white" if value < 0.5 else "black"
            axis.text(
                lengths.index(length), depths.index(depth), f"{value:.2f}", ha="center", va="center", color=colour
            )
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set(title=task, xlabel="length, tokens", ylabel="depth of the needle" if task == tasks[0] else "")
    return _save(figure, path)


def position_losses(values: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path:
    """Loss against position, a line a source; a line that still falls at its end uses the whole window."""
    figure, (axis,) = _figure(1, (6, 4))
    for source, rows in values.items():
        if rows:
            centre = [((row["first"] + 1) * (row["last"] + 1)) ** 0.5 for row in rows]
            axis.plot(centre, [row["loss"] for row in rows], marker="o", label=source)
    axis.set_xscale("log", base=2)
    axis.set(xlabel="position in the window, tokens", ylabel="loss, nats per token", title="Loss by position")
    axis.legend(frameon=False)
    axis.grid(alpha=0.3)
    return _save(figure, path)


def _figure(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * count, size[1]), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    return figure, list(axes)


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
