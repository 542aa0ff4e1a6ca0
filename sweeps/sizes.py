"""Widths of each budget by a rule on tokens per parameter. Pure arithmetic.

At a fixed budget D / N falls as N grows, so a range of tokens per parameter is a range of sizes; they are spread evenly
in ln N, as the parabola over ln N wants them (Hoffmann et al. 2022, arXiv 2203.15556, approach 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.plan import n_params, tokens_for_budget
from sweeps.config import SweepConfig

_MAX_WIDTH = 1 << 16

Shapes = dict[int, ModelConfig]


def widths_of(config: SweepConfig, build: Callable[[int], ModelConfig]) -> dict[float, tuple[int, ...]]:
    """Each budget's widths, ascending: those of the config, or those that its rule `sizes` finds.

    In mode trunk all budgets take their widths from one ladder, so that a trunk serves several of them.

    Args:
        build: the shape of a width; raises ConfigError where it makes none.

    Raises:
        ConfigError: the rule finds no such sizes, with the reason.
    """
    if config.sizes is None:
        return {budget: tuple(sorted(widths)) for budget, widths in config.budgets.items()}
    budgets = sorted(config.budgets)
    shapes = _family(config, build, budgets[-1])
    wanted = {budget: _nearest(config, shapes, budget) for budget in budgets}
    if config.mode == "trunk":
        wanted = _from_one_ladder(config, shapes, wanted)
    for budget, widths in wanted.items():
        if len(set(widths)) < len(widths):
            found = sorted(set(widths))
            raise ConfigError(
                f"sizes: {budget:g} FLOPs has only {len(found)} different widths ({', '.join(map(str, found))}) for"
                f" {len(widths)} sizes; lower sizes.width_multiple or per_budget, or widen tokens_per_parameter"
            )
    return wanted


def tokens_per_parameter(config: SweepConfig, shape: ModelConfig, budget: float) -> float:
    """D / N of a shape that spends `budget` FLOPs, N under lm.plan's default convention."""
    return tokens_for_budget(shape, budget, config.data.sequence_length) / n_params(shape)


def _family(config: SweepConfig, build: Callable[[int], ModelConfig], budget: float) -> Shapes:
    """Shapes width by width, up to the first that the largest budget trains on too few tokens."""
    assert config.sizes is not None
    step, low = config.sizes.width_multiple, config.sizes.tokens_per_parameter[0]
    shapes: Shapes = {}
    problem = ""
    for width in range(step, _MAX_WIDTH, step):
        try:
            shapes[width] = build(width)
        except ConfigError as error:  # no head size divides this width
            problem = str(error)
            if not shapes and width > 64 * step:
                break  # nothing will: a mistake in `model`
            continue
        if tokens_per_parameter(config, shapes[width], budget) < low / 2:
            break
    if not shapes:
        raise ConfigError(f"sizes: no multiple of {step} makes a model: {problem}")
    return shapes


def _nearest(config: SweepConfig, shapes: Shapes, budget: float) -> tuple[int, ...]:
    """For each target the width whose D / N is nearest to it by ratio."""
    assert config.sizes is not None
    logs = {width: math.log(tokens_per_parameter(config, shape, budget)) for width, shape in shapes.items()}
    chosen = []
    for target in config.sizes.targets():
        width = min(logs, key=lambda w: abs(logs[w] - math.log(target)))
        off = math.exp(logs[width]) / target
        if not 0.5 < off < 2:
            raise ConfigError(
                f"sizes: {budget:g} FLOPs has no size near {target:.3g} tokens per parameter (width {width} has"
                f" {off * target:.3g}); raise the budget, lower sizes.width_multiple, or narrow tokens_per_parameter"
            )
        chosen.append(width)
    return tuple(chosen)


def _from_one_ladder(
    config: SweepConfig, shapes: Shapes, wanted: dict[float, tuple[int, ...]]
) -> dict[float, tuple[int, ...]]:
    """As many neighbouring rungs of one ladder for each budget, those nearest to its own widths.

    The ladder has the spacing of the budgets' own widths: N from the smallest one of all to the largest.
    """
    assert config.sizes is not None
    count = config.sizes.per_budget
    low, high = config.sizes.tokens_per_parameter
    ratio = (high / low) ** (0.5 / max(1, count - 1))  # D / N goes as N^-2 at a fixed budget
    sizes = {width: math.log(n_params(shape)) for width, shape in shapes.items()}
    first, last = (sizes[end(w for widths in wanted.values() for w in widths)] for end in (min, max))
    steps = max(count - 1, round((last - first) / math.log(ratio)))
    rungs = sorted({_closest(sizes, first + (last - first) * i / max(1, steps)) for i in range(steps + 1)})
    return {budget: _window(sizes, rungs, widths) for budget, widths in wanted.items()}


def _closest(sizes: dict[int, float], target: float) -> int:
    return min(sizes, key=lambda width: abs(sizes[width] - target))


def _window(sizes: dict[int, float], rungs: Sequence[int], widths: Sequence[int]) -> tuple[int, ...]:
    """The len(widths) neighbouring rungs that lie nearest to `widths` in ln N; all where there are no more."""
    if len(rungs) <= len(widths):
        return tuple(rungs) + (rungs[-1],) * (len(widths) - len(rungs))  # too few: told as widths that coincide
    windows = [rungs[i : i + len(widths)] for i in range(len(rungs) - len(widths) + 1)]
    return tuple(min(windows, key=lambda w: sum(abs(sizes[a] - sizes[b]) for a, b in zip(w, widths, strict=True))))
