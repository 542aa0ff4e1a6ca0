"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lm.errors import ConfigError

KINDS = ("cosine", "wsd", "cooldown")
DECAY_SHAPES = ("linear", "1-sqrt", "cosine")


@dataclass(frozen=True)
class ScheduleConfig:
    """Warmup, then cosine or warmup-stable-decay (WSD; Hu et al. 2024, arXiv 2404.06395); or a cooldown.

    Attributes:
        kind: cosine; wsd; or cooldown, which starts from a checkpoint (--ckpt_path) of any schedule, at the rate that
            its last step had, and reaches the floor with the last step of this run.
        warmup_steps: linear warmup; the first step already has peak / warmup_steps. A cooldown has none.
        decay_fraction: WSD: share of all steps, at the end, over which the rate falls.
        decay_shape: how it falls, WSD and cooldown: linear, 1-sqrt (1 minus the root of the share done: Hagele et al.
            2024, arXiv 2405.18392, eq. 1) or cosine.
        floor: last rate as a share of the peak.
        cooldown_from_step: first step of a cooldown; the run takes it from its checkpoint.
        cooldown_from: share of the peak at which it starts; the run takes it from its checkpoint.
    """

    kind: str = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    decay_shape: str = "linear"
    floor: float = 0.1
    cooldown_from_step: int | None = None
    cooldown_from: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"schedule.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.decay_shape not in DECAY_SHAPES:
            raise ConfigError(
                f"schedule.decay_shape must be one of {', '.join(DECAY_SHAPES)}, got {self.decay_shape!r}"
            )
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps must not be negative, got {self.warmup_steps}")
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"schedule.decay_fraction must be in (0, 1], got {self.decay_fraction}")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"schedule.floor must be in [0, 1], got {self.floor}")


def lr_multiplier(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Share of the peak learning rate used by optimizer step `step` (0-based) of `total_steps`.

    Warmup: (step + 1) / warmup. Cosine: floor + (1 - floor) (1 + cos(pi p)) / 2 with p the share of the steps after
    warmup that are done. WSD: 1 until the decay begins, then decay_shape from 1 to the floor. Cooldown: decay_shape
    from `cooldown_from`, which step `cooldown_from_step` has, to the floor, which the last step has.

    Raises:
        ConfigError: a cooldown that does not know where it starts.
    """
    if schedule.kind == "cooldown":
        return _cooldown(step, total_steps, schedule)
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "cosine":
        p = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
        return _decay(p, 1.0, schedule.floor, "cosine")
    decay_start = wsd_decay_start(total_steps, schedule)
    if step < decay_start:
        return 1.0
    return _decay((step - decay_start) / max(1, total_steps - decay_start), 1.0, schedule.floor, schedule.decay_shape)


def _cooldown(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    first, top = schedule.cooldown_from_step, schedule.cooldown_from
    if first is None or top is None:
        raise ConfigError("schedule.kind cooldown starts from a checkpoint: give its folder with --ckpt_path")
    if step <= first:
        return top
    return _decay((step - first) / max(1, total_steps - 1 - first), top, schedule.floor, schedule.decay_shape)


def _decay(p: float, top: float, floor: float, shape: str) -> float:
    """From `top` at p = 0 to `floor` at p = 1."""
    p = min(p, 1.0)
    if shape == "1-sqrt":
        return top - (top - floor) * math.sqrt(p)
    if shape == "cosine":
        return floor + (top - floor) * 0.5 * (1 + math.cos(math.pi * p))
    return top - (top - floor) * p


def wsd_decay_start(total_steps: int, schedule: ScheduleConfig) -> int:
    """First step of WSD's decay."""
    return max(schedule.warmup_steps, total_steps - round(schedule.decay_fraction * total_steps))
