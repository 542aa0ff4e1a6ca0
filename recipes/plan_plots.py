"""Two figures of a plan: memory of a device by part, seconds of a step by part. Matplotlib without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, told apart by all eyes.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#999999")
_NAMES = {
    "parameters": "fp32 weights",
    "gradients": "gradients",
    "optimizer": "AdamW moments",
    "activations": "activations",
    "loss": "logits and head's gradient",
    "weights": "gathered weights",
    "buffers": "gradients on their way",
    "compute": "forward and backward",
    "recompute": "computed again",
    "communication": "communication, not hidden",
    "hidden": "communication, hidden behind computing",
}


def plot(plan: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write memory.png and time.png to a folder; returns their paths."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in (("memory", _memory), ("time", _time)):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        draw(figure.subplots(), plan)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _bars(axes: Any, parts: Sequence[tuple[str, float]], unit: str) -> None:
    """Horizontal bars from the top, each with its value."""
    names, values = [_NAMES[name] for name, _ in parts], [value for _, value in parts]
    axes.barh(names, values, color=_COLOURS[: len(parts)], height=0.7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(values))
    for i, value in enumerate(values):
        axes.text(value, i, f" {value:.3g} {unit}", va="center")
    axes.spines[["top", "right"]].set_visible(False)


def _memory(axes: Any, plan: Mapping[str, Any]) -> None:
    memory = plan["memory"]
    _bars(axes, [(name, value / 1e9) for name, value in memory["parts_bytes"].items()], "GB")
    total, usable = memory["total_bytes"] / 1e9, memory["usable_bytes"] / 1e9
    axes.set_xlabel("GB of one device, when its backward pass begins")
    where = f"{plan['name']} on {plan['cluster']['device']}"
    axes.set_title(f"{where}: {total:.1f} of {usable:.1f} usable GB\n{plan['layout']['describe']}", fontsize=10)


def _time(axes: Any, plan: Mapping[str, Any]) -> None:
    step = plan["step"]
    _bars(axes, list(step["parts_seconds"].items()), "s")
    axes.set_xlabel("seconds of one optimizer step; what is hidden adds nothing")
    axes.set_title(
        f"{plan['name']}: {step['seconds']:.3g} s a step, {step['tokens_per_s']:,.0f} tokens/s, MFU {step['mfu']:.1%}\n"
        f"{plan['layout']['describe']}",
        fontsize=10,
    )
