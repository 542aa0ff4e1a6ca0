"""Stages with longer sequences: RoPE and the weight of long documents go with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback

from lm.data.changes import LongDocuments, StageChange
from lm.data.ramp import BatchRamp
from lm.errors import ConfigError
from lm.rope_scaling import RopeScaling
from lm.rope_stages import RopeChange, check_reach, config_at

OWNER = "LongContext"


@dataclass(frozen=True)
class LongStage:
    """One stage. What is null stays as it was before.

    Attributes:
        sequence_length: T, tokens a window. A step keeps its tokens: it has fewer windows.
        from_tokens: training tokens before the stage; it begins with the first step at or after them.
        from_fraction: the same as a share of the run's tokens; give one of the two.
        rope_theta: RoPE base.
        rope_scaling: how RoPE is stretched, see lm.rope_scaling.
        weights: share of each source, as in data.weights.
        long_documents: min_tokens and share: so much of each source's weight goes to its documents of at least
            min_tokens tokens, the rest to its shorter ones; share 1 drops those.
    """

    sequence_length: int
    from_tokens: float | None = None
    from_fraction: float | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    weights: dict[str, Any] | None = None
    long_documents: LongDocuments | None = None

    def __post_init__(self) -> None:
        where = f"long_context: the stage of sequence_length {self.sequence_length}"
        if self.sequence_length < 1:
            raise ConfigError(f"{where}: sequence_length must be at least 1")
        if (self.from_tokens is None) == (self.from_fraction is None):
            raise ConfigError(f"{where} needs one of from_tokens and from_fraction")
        if self.from_fraction is not None and not 0 < self.from_fraction < 1:
            raise ConfigError(f"{where}: from_fraction must lie between 0 and 1, got {self.from_fraction}")
        if self.from_tokens is not None and not 1 <= self.from_tokens < math.inf:
            raise ConfigError(f"{where}: from_tokens must be a number from 1 on, got {self.from_tokens:g}")
        if self.rope_theta is not None and not 1 < self.rope_theta < math.inf:
            raise ConfigError(f"{where}: rope_theta must be above 1, got {self.rope_theta}")

    def start(self, ramp: BatchRamp, max_steps: int) -> int:
        """Training tokens before the stage."""
        if self.from_tokens is not None:
            return int(self.from_tokens)
        if max_steps < 1:
            raise ConfigError("long_context: from_fraction needs the length of the run: set tokens, or use from_tokens")
        assert self.from_fraction is not None
        return max(1, int(self.from_fraction * ramp.tokens(max_steps)))


class LongContext(Callback):
    """Raises the sequence length in stages, with RoPE base or scaling and the weight of long documents.

    A stage is computed from the step alone: a resume lands in the right one, with the RoPE that the config gives it.
    Validation stays at the first sequence length; val_loss_long is at the longest.

    Args:
        stages: in the order of their start.

    Raises:
        ConfigError: stages that do not follow each other, do not divide the batch, are longer than a source or than
            their RoPE scaling reaches; before training starts.
    """

    def __init__(self, stages: list[LongStage]):
        if not stages:
            raise ConfigError("long_context: stages must hold at least one stage")
        self.stages = list(stages)
        self._max_steps = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._max_steps = trainer.max_steps
        data = trainer.datamodule
        data.contribute(OWNER, self._changes)
        ramp = data.plan.ramp
        pl_module.rope_changes = [
            RopeChange(part.start(ramp, self._max_steps), part.rope_theta, part.rope_scaling) for part in self.stages
        ]
        for part in data.plan.stages:
            config = config_at(
                pl_module.model_config, pl_module.rope_changes, ramp, ramp.first_step_at(part.from_tokens)
            )
            check_reach(part.sequence_length, config.rope_scaling, f"the stage from {part.from_tokens} tokens on")

    def _changes(self, ramp: BatchRamp) -> Sequence[StageChange]:
        return [
            StageChange(part.start(ramp, self._max_steps), part.sequence_length, part.weights, part.long_documents)
            for part in self.stages
        ]
