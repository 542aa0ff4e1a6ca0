"""Draws the dashboard of a run: small multiples of what plugins.callbacks.dashboard recorded in MLflow.

Examples:
  python -m recipes.dashboard runs/small --out dashboard.png
  python -m recipes.dashboard 3f0c1c6d2f7d4f7c8d5e8c4b8a3f2e11 --out dashboard.png
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status
from recipes.files import check_places

History = Mapping[str, Sequence[tuple[int, float]]]

# (title, unit, metrics or their first parts, logarithmic)
PANELS = (
    ("loss by source", "nats per token", ("loss",), False),
    ("gradient norm by layer", "before clipping", ("grad_norm",), True),
    ("update over weight by layer", "", ("update_ratio",), True),
    ("largest attention logit by layer", "", ("attention_logit",), False),
    ("residual RMS by layer", "", ("residual_rms",), True),
    ("log Z", "nats", ("log_z",), False),
    ("eps over root of second moment", "", ("eps_ratio",), True),
    ("seconds a step by rank", "s", ("step_seconds", "work_seconds"), False),
    ("clipped and skipped steps", "share", ("clipped_fraction", "skipped_fraction"), False),
    ("tokens a second", "", ("tokens_per_s",), False),
    ("memory of the fullest rank", "GB", ("memory_gb",), False),
    ("MFU", "share", ("mfu",), False),
)
_ENDS = {"embedding": "#b8590b", "head": "#9c1c5b", "final_norm": "0.55"}  # parts that are no layer
_CATEGORIES = ("#1f5fa8", "#c2571a", "#1a7f37", "#7a4ea3", "#8a6d00", "#0f7c80")
_LABELLED = 6


def main(argv: list[str] | None = None) -> int:
    """Read a run's metrics, draw them, say where."""
    parser = command_parser("recipes.dashboard", __doc__)
    parser.add_argument("run", help="a run's folder, or the id of its MLflow run")
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"), help="the picture, .png, .pdf or .svg")
    options = parser.parse_args(argv)

    def command() -> None:
        from plugins.loggers.read_run import metric_history

        check_places((options.out,))
        draw(metric_history(options.run), options.run, options.out)
        print(options.out)

    return exit_status(command)


def draw(history: History, title: str, path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: the run recorded nothing that is shown here.
    """
    shown = [panel for panel in PANELS if _series(history, panel[2])]
    if not any(name.startswith("update_ratio") for name in history):
        raise ConfigError(f"{title} has no metrics of a dashboard; add plugins.callbacks.dashboard.Dashboard to it")
    from matplotlib.figure import Figure

    rows = -(-len(shown) // 3)
    figure = Figure(figsize=(15.0, 3.6 * rows), layout="constrained")
    for index, (name, unit, prefixes, logarithmic) in enumerate(shown):
        axis = figure.add_subplot(rows, 3, index + 1)
        _panel(axis, _series(history, prefixes), logarithmic, unit == "share")
        axis.set_title(f"{name}, {unit}" if unit else name, fontsize=11, loc="left")
    figure.supxlabel("step", fontsize=10)
    figure.suptitle(title, fontsize=12)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _series(history: History, prefixes: Sequence[str]) -> dict[str, Sequence[tuple[int, float]]]:
    """Metrics of a panel by the label each gets, in order: layers and ranks by number, embedding first."""
    found: dict[str, Sequence[tuple[int, float]]] = {}
    for prefix in prefixes:
        if prefix in history and prefix != "grad_norm":
            label = "all" if prefix == "loss" else prefix.split("_")[0] if len(prefixes) > 1 else prefix
            found[label] = history[prefix]
        names = [name for name in history if name.startswith(f"{prefix}/")]
        for name in sorted(names, key=_order):
            label = name.partition("/")[2].replace("_", " ")
            found[f"{label} (own work)" if prefix == "work_seconds" else label] = history[name]
        if prefix == "loss" and found and "val_loss" in history:
            found["validation"] = history["val_loss"]
    return found


def _order(name: str) -> tuple[int, int, str]:
    end = name.partition("/")[2]
    digits = end.rpartition("_")[2]
    if digits.isdecimal():
        return 1, int(digits), ""
    return (0 if end == "embedding" else 2), 0, end


def _panel(axis: Any, series: Mapping[str, Sequence[tuple[int, float]]], logarithmic: bool, shares: bool) -> None:
    numbered = [label for label in series if label.split(" ")[0] in ("block", "rank") and "own" not in label]
    colours = _colours(series, numbered)
    shown = set(_spread(numbered)) | (set(series) - set(numbered))
    if len(numbered) > _LABELLED:
        shown -= {label for label in series if "own work" in label and label.split(" (")[0] not in shown}
    for label, points in series.items():
        axis.plot(
            *zip(*points, strict=True), color=colours[label], lw=1.3, ls="--" if "own work" in label else "-",
            marker="o" if len(points) < 4 or label == "validation" else None, ms=3,
            label=label if label in shown else None,
        )  # fmt: skip
    values = [value for points in series.values() for _, value in points]
    if logarithmic and min(values) > 0 and max(values) > 10 * min(values):
        axis.set_yscale("log")
    if shares:
        axis.set_ylim(-0.03, 1.03)
    axis.grid(True, which="major", color="0.92", lw=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    if len(series) > 1:
        axis.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.2)


def _spread(labels: list[str]) -> list[str]:
    """At most _LABELLED of them, the first and the last included."""
    if len(labels) <= _LABELLED:
        return labels
    return [labels[round(index * (len(labels) - 1) / (_LABELLED - 1))] for index in range(_LABELLED)]


def _colours(series: Mapping[str, Any], numbered: list[str]) -> dict[str, Any]:
    """Layers and ranks on a sequential scale, so that depth is seen; anything else by category."""
    import matplotlib

    ramp = matplotlib.colormaps["viridis"]
    colours: dict[str, Any] = {
        label: ramp(0.05 + 0.85 * index / max(len(numbered) - 1, 1)) for index, label in enumerate(numbered)
    }
    others = iter(_CATEGORIES * len(series))
    for label in series:
        base = label.split(" (")[0]
        if base in colours:
            colours[label] = colours[base]
        elif label in ("all", "validation"):
            colours[label] = "0.25" if label == "all" else "black"
        else:
            colours[label] = _ENDS.get(label.replace(" ", "_")) or next(others)
    return colours


if __name__ == "__main__":
    sys.exit(main())
