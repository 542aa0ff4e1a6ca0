"""Coordinate check: activation scales after 10 steps at each width, muP against the standard parametrisation.

Prints the scales and, for each optimizer, the largest ratio between widths; --out draws them. muP is right where the
ratio stays below 2.

Examples:
    python -m recipes.bench coordinates --out coordinates.png
    python -m recipes.bench coordinates --widths 64 128 256 512 1024 --optimizers adamw muon muon_original
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from lm.optim.coordinate_check import BASE_WIDTH, D_HEAD, OPTIMIZERS, Scales, coordinate_check, worst_ratio
from recipes.command import command_parser

Results = dict[tuple[str, bool], dict[int, Scales]]


def run(arguments: list[str]) -> None:
    """Measure, print JSON, draw."""
    parser = command_parser("recipes.bench coordinates", __doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="d_model of each model")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"], choices=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=10, help="updates before measuring")
    parser.add_argument("--out", type=Path, help="PNG to draw")
    options = parser.parse_args(arguments)
    if any(width % D_HEAD or width < BASE_WIDTH for width in options.widths) or len(options.widths) < 2:
        raise ConfigError(
            f"--widths needs two or more multiples of {D_HEAD} from {BASE_WIDTH} on, got {options.widths}"
        )
    results: Results = {
        (name, mup): coordinate_check(options.widths, name, mup, options.steps)
        for name in options.optimizers
        for mup in (True, False)
    }
    print(json.dumps([_entry(name, mup, scales) for (name, mup), scales in results.items()], indent=1))
    if options.out is not None:
        draw(results, options.steps, options.out)


def _entry(optimizer: str, mup: bool, scales: dict[int, Scales]) -> dict[str, Any]:
    ratio, activation = worst_ratio(scales)
    return {
        "optimizer": optimizer,
        "parametrisation": _label(mup),
        "worst_ratio": round(ratio, 3),
        "worst_activation": activation,
        "mean_abs": {width: {name: round(x, 4) for name, x in scale.items()} for width, scale in scales.items()},
    }


def _label(mup: bool) -> str:
    return "muP" if mup else "standard"


def draw(results: Results, steps: int, path: Path) -> None:
    """A panel for each optimizer and parametrisation: mean |x| over width, a line for each activation."""
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys(name for name, _ in results))
    figure = Figure(figsize=(9, 3.2 * len(rows)))
    axes = figure.subplots(len(rows), 2, sharex=True, sharey="row", squeeze=False)
    for (name, mup), scales in results.items():
        axis = axes[rows.index(name)][0 if mup else 1]
        widths = list(scales)
        for activation in scales[widths[0]]:
            axis.plot(widths, [scales[width][activation] for width in widths], marker="o", label=activation)
        axis.set(xscale="log", yscale="log", title=f"{name}, {_label(mup)}: ratio {worst_ratio(scales)[0]:.2f}")
        axis.set_xticks(widths, [str(width) for width in widths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("d_model")
    for line in axes:
        line[0].set_ylabel(f"mean |x| after {steps} steps")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
