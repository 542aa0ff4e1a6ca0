"""The model of a width: what the sweep's family fixes, what follows from the width."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig, MuPConfig
from lm.errors import ConfigError
from sweeps.config import SweepConfig


def model_config(config: SweepConfig, width: int, vocab_size: int) -> ModelConfig:
    """Shape of the size `width`.

    Raises:
        ConfigError: an unknown or bad setting of `model`, or a width that no allowed head size divides.
    """
    settings: dict[str, Any] = dict(config.model)
    for owned in ("vocab_size", "d_model", "n_heads"):
        if owned in settings:
            raise ConfigError(f"model.{owned} follows from the corpus, the widths and d_head; remove it")
    if isinstance(settings.get("mup"), Mapping):
        settings["mup"] = _dataclass(MuPConfig, settings["mup"], "model.mup")
    settings |= {"vocab_size": vocab_size, "d_model": width, "n_heads": width // head_size(width, config.d_head)}
    if (layers := config.depth.layers_for(width)) is not None:
        if "n_layers" in settings:
            raise ConfigError("model.n_layers follows from depth.d_model_per_layer; remove one of the two")
        settings["n_layers"] = layers
    settings.setdefault("n_layers", 3)
    return _dataclass(ModelConfig, settings, "model")


def head_size(width: int, d_head: int) -> int:
    """The even divisor of `width` nearest to `d_head` by ratio, at most a factor 2 away; the larger one of equals.

    Raises:
        ConfigError: there is none.
    """
    divisors = [size for size in range(2, width + 1, 2) if width % size == 0 and d_head <= 2 * size <= 4 * d_head]
    if not divisors:
        raise ConfigError(
            f"width {width} does not divide by a head size near {d_head} (even, {-(-d_head // 2)} to {2 * d_head});"
            f" take {max(1, round(width / d_head)) * d_head} or change d_head"
        )
    return min(divisors, key=lambda size: (max(size / d_head, d_head / size), -size))


def _dataclass(kind: type, values: Mapping[str, Any], where: str) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError(f"unknown setting {where}.{unknown[0]}; known: {', '.join(known)}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None
