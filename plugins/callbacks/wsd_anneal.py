"""The mix of the end of a run: better data while the learning rate falls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback

from lm.data.changes import StageChange
from lm.data.ramp import BatchRamp
from lm.errors import ConfigError
from lm.module import LlamaModule
from lm.optim.schedule import wsd_decay_start

OWNER = "WSDAnneal"


class WSDAnneal(Callback):
    """Switches to another mix at the first step of the decay (Hu et al. 2024, arXiv 2404.06395, sec. 4.3).

    With schedule.kind wsd the step follows from the length of the run; with cooldown it is that of the checkpoint which
    the cooldown began from, also when it is continued. Sequence length and RoPE stay as they are.

    Args:
        weights: share of each source from there on, as in data.weights: numbers, which need not sum to 1, or a rule.

    Raises:
        ConfigError: in setup; no decay (cosine), a decay from the first step on, or an unknown source.
    """

    def __init__(self, weights: dict[str, Any]):
        if not weights:
            raise ConfigError("wsd_anneal: weights must name at least one source")
        self.weights = dict(weights)
        self._module: LlamaModule | None = None
        self._max_steps = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if pl_module.schedule.kind not in ("wsd", "cooldown"):
            raise ConfigError(
                f"wsd_anneal needs schedule.kind wsd or cooldown, this run has {pl_module.schedule.kind}: it has no"
                " step at which a decay begins"
            )
        self._module, self._max_steps = pl_module, trainer.max_steps
        trainer.datamodule.contribute(OWNER, self._changes)

    def decay_start(self) -> int | None:
        """First step of the decay; None for a cooldown whose checkpoint is not loaded yet."""
        assert self._module is not None
        schedule = self._module.schedule
        if schedule.kind == "cooldown":
            return schedule.cooldown_from_step
        return wsd_decay_start(self._max_steps, schedule)

    def _changes(self, ramp: BatchRamp) -> Sequence[StageChange]:
        start = self.decay_start() if self._max_steps > 0 else None  # validation of a config without a length
        return [] if start is None else [StageChange(ramp.tokens(start), weights=self.weights)]
