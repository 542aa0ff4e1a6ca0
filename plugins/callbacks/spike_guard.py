"""Keeps spikes out of the weights: skips the step, after repeated strikes goes back and drops the data around them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback

from lm.data.dropped import Ranges, step_range, with_ranges
from lm.data.order import merge_ranges
from lm.errors import ConfigError, RunStopped
from plugins.callbacks import rewind, roll_backs
from plugins.callbacks.checkpoint import SavingCallback, saving_callback
from plugins.callbacks.diagnosis import diagnose
from plugins.callbacks.roll_backs import RollBack
from plugins.callbacks.spike_rules import Spike, make_rule
from plugins.callbacks.step_end import ends_step

_WIDEST_MARGIN = 1000  # steps; what is dropped is listed sample by sample


class SpikeGuard(Callback):
    """Judges each step by the gradient norm and the loss of its global batch before the optimizer applies anything.

    A step that is a spike by the rule (or not finite) is skipped, the same on all ranks: weights, moments and the
    optimizer's own step count stay, the run's step, data and schedule move on. After `strikes` skipped steps within
    `strike_window`, the run goes back, in the same process, to the newest checkpoint older than the first of them and
    drops the samples around them from its data order. A roll-back that gets no further than the one before goes one
    checkpoint further back where there is one, and drops twice the margin. After `max_roll_backs` the run stops with a
    diagnosis. See docs/spikes.md.

    Args:
        rule: robust, ema or sigma, see plugins.callbacks.spike_rules.
        window: accepted steps that the rule looks back on; null: the rule's own.
        threshold: of the rule, in its own units; null: the rule's own.
        warmup: accepted steps before the rule judges; what is not finite is skipped from the start. null: the rule's.
        strikes: skipped steps after which the run goes back.
        strike_window: steps within which they have to fall.
        max_roll_backs: in the whole run, restarts included; 0: only skip, never go back, never stop.
        margin_steps: steps before and after each strike whose samples are dropped with it.

    Attributes:
        skipped_steps: by this guard, on the branch that the run is on.
        roll_backs: what was rolled back, oldest first.
    """

    def __init__(
        self,
        rule: str = "robust",
        window: int | None = None,
        threshold: float | None = None,
        warmup: int | None = None,
        strikes: int = 5,
        strike_window: int = 50,
        max_roll_backs: int = 3,
        margin_steps: int = 4,
    ) -> None:
        if not 1 <= strikes <= strike_window or max_roll_backs < 0 or not 0 <= margin_steps <= _WIDEST_MARGIN:
            raise ConfigError(
                "spike_guard: strikes must be from 1 to strike_window, max_roll_backs 0 or more, margin_steps from 0 to"
                f" {_WIDEST_MARGIN}, got strikes {strikes}, strike_window {strike_window}, max_roll_backs"
                f" {max_roll_backs}, margin_steps {margin_steps}"
            )
        self.rule = make_rule(rule, window, threshold, warmup)
        self.strikes, self.strike_window = strikes, strike_window
        self.max_roll_backs, self.margin_steps = max_roll_backs, margin_steps
        self.skipped_steps = 0
        self.roll_backs: list[RollBack] = []
        self._struck: list[int] = []  # 0-based steps of the strikes that still count
        self._regime: list[int] | None = None
        self._spike: Spike | None = None  # of the step under way
        self._unwritten = False  # whether the file of roll-backs lacks one
        self._trainer: Any = None

    # Hooks ----------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not hasattr(trainer.strategy, "guards"):
            raise ConfigError(
                "spike_guard needs a strategy of this recipe (single, ddp, fsdp, hsdp, zero1, zero2, zero3), got"
                f" {type(trainer.strategy).__name__}"
            )
        self._trainer = trainer
        if self._judge not in trainer.strategy.guards:
            trainer.strategy.guards.append(self._judge)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        rewind.interpose(trainer, lambda: self._between_steps(trainer))
        self._recall(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not ends_step(trainer, batch_idx):
            return
        spike, self._spike = self._spike, None
        if spike is not None:
            self._say(f"step {trainer.global_step} skipped: {spike}")
            self._record(pl_module, {f"spike/{spike.quantity}": spike.value, **self._counts()})
        elif trainer.global_step % trainer.log_every_n_steps == 0:
            self._record(pl_module, self._counts())
            self._write_down(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        guards = getattr(trainer.strategy, "guards", [])
        if self._judge in guards:
            guards.remove(self._judge)
        self._trainer = None

    # One step -------------------------------------------------------------------------------------------------------

    def _judge(self, grad_norm: float, loss: float) -> bool:
        """Whether to skip; the same on all ranks, which ask with the same numbers and hold the same statistics."""
        step = self._trainer.global_step
        regime = self._present_regime(step)
        if self._regime is not None and regime != self._regime:
            self.rule.reset()  # another mix, length or batch has another loss and norm, and that is no spike
        self._regime = regime
        self._spike = self.rule.judge(grad_norm, loss)
        if self._spike is None:
            return False
        self.skipped_steps += 1
        self._struck = [at for at in self._struck if at > step - self.strike_window] + [step]
        return True

    def _present_regime(self, step: int) -> list[int]:
        """[stage of the data plan, tokens of a batch] of a step, as far as the data has such."""
        plan = getattr(self._trainer.datamodule, "plan", None)
        return [] if plan is None else [plan.stage_of_step(step), plan.ramp.batch(step)]

    def _counts(self) -> dict[str, float]:
        limits = {f"spike/{quantity}_limit": limit for quantity, limit in self.rule.limits().items()}
        return {"spike/skipped_steps": self.skipped_steps, "spike/roll_backs": len(self.roll_backs), **limits}

    def _record(self, pl_module: Any, values: dict[str, float]) -> None:
        if hasattr(pl_module, "record"):
            pl_module.record({name: value for name, value in values.items() if np.isfinite(value)})

    # Going back -----------------------------------------------------------------------------------------------------

    def _between_steps(self, trainer: Any) -> None:
        if len(self._struck) < self.strikes or self.max_roll_backs == 0 or self._inside_step(trainer):
            return
        if len(self.roll_backs) >= self.max_roll_backs:
            self._stop(trainer)
        if not hasattr(trainer.datamodule, "rolled_back"):
            self._go_on("this data module cannot drop samples")
            return
        trainer.strategy.saver.wait()
        trainer.strategy.barrier("spike_guard")  # every rank's part of a save in the background is written
        path = rewind.first_sound(self._candidates(trainer), self._say)
        if path is None:
            self._go_on(f"no sound checkpoint is older than the first strike, at step {self._struck[0] + 1}")
            return
        self._roll_back(trainer, path)

    def _inside_step(self, trainer: Any) -> bool:
        return trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches != 0

    def _go_on(self, why: str) -> None:
        self._say(f"{len(self._struck)} strikes within {self.strike_window} steps, but {why}: steps are skipped only")
        self._struck = []

    def _stalled(self) -> int:
        """How many roll-backs in a row, the last one first, were followed by strikes no later than its own."""
        firsts = [*(past.first_strike for past in self.roll_backs), self._struck[0]]
        count = 0
        while count < len(self.roll_backs) and firsts[-1 - count] <= firsts[-2 - count] + self.margin_steps:
            count += 1
        return count

    def _candidates(self, trainer: Any) -> list[Path]:
        """Complete checkpoints older than the first strike, best first."""
        complete = rewind.complete_checkpoints(SavingCallback.folder(trainer))
        older = [(step, path) for step, path in complete if step <= self._struck[0]]
        if self._stalled():  # what went wrong may be in the checkpoint already
            before = [item for item in older if item[0] < self.roll_backs[-1].to_step]
            older = before + [item for item in older if item not in before][::-1]
        return [path for _, path in older]

    def _roll_back(self, trainer: Any, path: Path) -> None:
        data, step = trainer.datamodule, trainer.global_step
        struck, margin = list(self._struck), self.margin_steps << self._stalled()
        history = list(self.roll_backs)
        order = data.order
        self._struck = []  # also where the checkpoint is from before the guard
        rewind.load(trainer, path)
        to_step = trainer.global_step
        dropped = self._around(order, struck, margin, to_step)
        skipped = with_ranges(order, dropped)
        self.roll_backs = [*history, RollBack(struck[0], struck[-1], step, to_step, dropped)]
        rewind.remove_after(path.parent, to_step)
        saving_callback(trainer).went_back()
        data.rolled_back(skipped)
        self._unwritten = True
        self._write_down(trainer)
        rewind.reload_data(trainer)
        samples = sum(stop - start for start, stop in dropped)
        self._say(
            f"{len(struck)} strikes from step {struck[0] + 1} to {struck[-1] + 1}: back from step {step} to {path}"
            f" (roll-back {len(self.roll_backs)} of {self.max_roll_backs}), {samples} samples around them are dropped"
        )
        self._tell_loggers(trainer, to_step)

    def _write_down(self, trainer: Any) -> None:
        if self._unwritten and trainer.is_global_zero:
            skipped = trainer.datamodule.order.skipped
            self._unwritten = not roll_backs.write(Path(trainer.default_root_dir), self.roll_backs, skipped)

    def _around(self, order: Any, struck: list[int], margin: int, to_step: int) -> Ranges:
        """Ranges of k of the struck steps and of `margin` steps about each, none before the checkpoint's step."""
        return merge_ranges(step_range(order, max(at - margin, to_step), at + margin) for at in struck)

    def _tell_loggers(self, trainer: Any, to_step: int) -> None:
        for logger in trainer.loggers if trainer.is_global_zero else []:
            if hasattr(logger, "rewind"):
                logger.rewind(to_step)
        roll_backs.tag(trainer, self.roll_backs, trainer.datamodule.order.skipped)

    def _stop(self, trainer: Any) -> None:
        """End the run with what is known; `--ckpt_path last` then means a state before the strikes."""
        folder = SavingCallback.folder(trainer)
        trainer.strategy.saver.wait()
        trainer.strategy.barrier("spike_guard")
        older = [step for step, _ in rewind.complete_checkpoints(folder) if step <= self._struck[0]]
        if older:
            rewind.remove_after(folder, max(older))
        histories = [callback.history for callback in trainer.callbacks if hasattr(callback, "history")]
        cause = diagnose(histories[0] if histories else {}, self._struck[0], self._struck_sources(trainer))
        left = f"checkpoint of step {max(older)} is left" if older else "there is no checkpoint from before them"
        raise RunStopped(
            f"spike guard: stopped at step {trainer.global_step}: new strikes from step {self._struck[0] + 1} after"
            f" {len(self.roll_backs)} roll-backs (max_roll_backs); {left}. Diagnosis: {cause}"
        )

    def _struck_sources(self, trainer: Any) -> dict[str, int]:
        """Samples of each source in the struck steps."""
        order = getattr(trainer.datamodule, "order", None)
        if order is None:
            return {}
        k = np.concatenate([order.step_samples(at) for at in self._struck])
        counts = np.bincount(order.locate(k)[0], minlength=len(order.source_names))
        return dict(zip(order.source_names, counts.tolist(), strict=True))

    # Restart --------------------------------------------------------------------------------------------------------

    def _recall(self, trainer: Any) -> None:
        """Take over the roll-backs that happened after this checkpoint was written, and tag the run with them."""
        past, skipped = roll_backs.recall(trainer)
        if len(past) > len(self.roll_backs) and hasattr(trainer.datamodule, "rolled_back"):
            to_step = past[len(self.roll_backs)].to_step
            if trainer.global_step > to_step:
                raise ConfigError(
                    f"the checkpoint of step {trainer.global_step} belongs to a branch that the spike guard gave up for"
                    f" the one of step {to_step}; continue from that one or an older one"
                )
            self.roll_backs = past
            trainer.datamodule.rolled_back(skipped)
            rewind.reload_data(trainer)
        if self.roll_backs:
            roll_backs.tag(trainer, self.roll_backs, trainer.datamodule.order.skipped)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: a run that continues with them decides the same as one that was never stopped."""
        return {
            "statistics": self.rule.state_dict(),
            "regime": self._regime,
            "struck": list(self._struck),
            "skipped_steps": self.skipped_steps,
            "roll_backs": [back.plain() for back in self.roll_backs],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["statistics"]["rule"] == self.rule.name:
            self.rule.load_state_dict(state_dict["statistics"])
        else:
            self.rule.reset()
        self._regime = state_dict["regime"]
        self._struck = [int(step) for step in state_dict["struck"]]
        self.skipped_steps = int(state_dict["skipped_steps"])
        self.roll_backs = [RollBack.from_plain(values) for values in state_dict["roll_backs"]]

    def _say(self, text: str) -> None:
        if self._trainer is not None and self._trainer.is_global_zero:
            print(f"spike guard: {text}", file=sys.stderr, flush=True)
