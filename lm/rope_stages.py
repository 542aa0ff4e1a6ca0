"""RoPE that changes in the course of a run. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lm.config import ModelConfig
from lm.data.ramp import BatchRamp
from lm.errors import ConfigError
from lm.rope_scaling import RopeScaling


@dataclass(frozen=True)
class RopeChange:
    """From the first step at or after `from_tokens` on; None leaves base or scaling as it was."""

    from_tokens: int
    theta: float | None = None
    scaling: RopeScaling | None = None


def config_at(config: ModelConfig, changes: Sequence[RopeChange], ramp: BatchRamp, step: int) -> ModelConfig:
    """The config with the RoPE that a 0-based step is trained with."""
    for change in changes:
        if ramp.first_step_at(change.from_tokens) <= step:
            theta = config.rope_theta if change.theta is None else change.theta
            scaling = config.rope_scaling if change.scaling is None else change.scaling
            config = dataclasses.replace(config, rope_theta=theta, rope_scaling=scaling)
    return config


def check_reach(sequence_length: int, scaling: RopeScaling | None, where: str) -> None:
    """Refuse windows that are longer than what the scaling stretches to; linear and dynamic have no such end.

    Raises:
        ConfigError: one line with the factor that would do.
    """
    if scaling is None or scaling.kind not in ("yarn", "llama3"):
        return
    reach = scaling.factor * scaling.original_max_position
    if sequence_length > reach:
        raise ConfigError(
            f"{where}: sequence_length {sequence_length} is longer than the {reach:.0f} positions that rope_scaling"
            f" {scaling.kind} reaches (factor {scaling.factor:g} x original_max_position"
            f" {scaling.original_max_position}); set a factor of at least"
            f" {sequence_length / scaling.original_max_position:g}"
        )
