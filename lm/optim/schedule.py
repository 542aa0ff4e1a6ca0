"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lm.errors import ConfigError


@dataclass(frozen=True)
class ScheduleConfig:
    """Warmup, then cosine or warmup-stable-decay (WSD; Hu et al. 2024, arXiv 2404.06395).

    Attributes:
        kind: 'cosine' or 'wsd'.
        warmup_steps: linear warmup; the first step already has peak / warmup_steps.
        decay_fraction: WSD: share of all steps, at the end, over which the rate falls linearly.
        floor: last rate as a share of the peak.
    """

    kind: str = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "wsd"):
            raise ConfigError(f"schedule.kind must be cosine or wsd, got {self.kind!r}")
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps must not be negative, got {self.warmup_steps}")
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(f"schedule.decay_fraction must be in (0, 1], got {self.decay_fraction}")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"schedule.floor must be in [0, 1], got {self.floor}")


def lr_multiplier(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Share of the peak learning rate used by optimizer step `step` (0-based) of `total_steps`.

    Warmup: (step + 1) / warmup. Cosine: floor + (1 - floor) (1 + cos(pi p)) / 2 with p the share of the steps after
    warmup that are done. WSD: 1 until the decay begins, then a line to the floor.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "cosine":
        p = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
        return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * min(p, 1.0)))
    decay_start = wsd_decay_start(total_steps, schedule)
    if step < decay_start:
        return 1.0
    p = (step - decay_start) / max(1, total_steps - decay_start)
    return 1 - (1 - schedule.floor) * min(p, 1.0)


def wsd_decay_start(total_steps: int, schedule: ScheduleConfig) -> int:
    """First step of WSD's decay."""
    return max(schedule.warmup_steps, total_steps - round(schedule.decay_fraction * total_steps))
