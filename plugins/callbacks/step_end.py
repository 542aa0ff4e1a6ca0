"""Optimizer steps: which micro-batch ends one, and a hook that Lightning lacks, when all else of the step is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

Action = Callable[[Trainer, LightningModule], None]


def ends_step(trainer: Any, batch_idx: int) -> bool:
    """In on_train_batch_end: whether this micro-batch is the last one of its optimizer step."""
    return bool((batch_idx + 1) % trainer.accumulate_grad_batches == 0)


def due(trainer: Any, batch_idx: int, every_n_steps: int) -> bool:
    """In on_train_batch_end: an optimizer step is complete, and it is an every_n_steps-th or the run's last."""
    step = trainer.global_step
    return ends_step(trainer, batch_idx) and (step % every_n_steps == 0 or step == trainer.max_steps)


def after_step(trainer: Trainer, owner: object, action: Action, order: int = 0) -> None:
    """Call `action(trainer, module)` after each optimizer step of `trainer.fit`, before its validation.

    on_train_batch_end comes too early to save: the module records the metrics of a step in that hook, after the
    callbacks, and they would be lost when the run dies between the save and the record.

    Args:
        owner: registering again under the same owner replaces its action.
        order: actions with a smaller number come first.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if not hasattr(loop, "step_actions"):
        loop.step_actions = {}
        advance_end = loop.on_advance_end

        def on_advance_end(data_fetcher: Any) -> None:
            # A resumed loop comes here once without a batch (lightning 2.6), to skip a validation.
            if not loop._should_accumulate() and not loop._skip_next_val:
                for _, step_action in sorted(loop.step_actions.values(), key=lambda pair: pair[0]):
                    step_action(trainer, trainer.lightning_module)
            advance_end(data_fetcher)

        loop.on_advance_end = on_advance_end
    loop.step_actions[id(owner)] = (order, action)
