"""Says which rank the others wait for, before the process group's own timeout ends them without a name."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from plugins.callbacks.step_end import after_step

EXIT_CODE = 142  # 128 + SIGALRM: a wait that lasted too long; from 128 on, schedulers take it for worth another try
_SHARE = 0.7  # of the strategy's timeout_seconds
_AFTER_STEP, _VALIDATION, _VALIDATED, _ENDED = range(1_000_000, 5_000_000, 1_000_000)  # after any micro-batch


@dataclass(frozen=True)
class Beat:
    """What one rank says of itself.

    Attributes:
        step: optimizer steps done.
        place: where in the step, growing.
        moved: when it came there, seconds since the epoch.
        alive: when its watching thread last said so; a stopped or dead process says nothing.
    """

    step: int
    place: int
    moved: float
    alive: float

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.place


def verdict(beats: dict[int, Beat], world_size: int, limit_seconds: float, now: float) -> dict[int, str]:
    """Each rank that the others wait for, and what is known of it; empty when nobody is behind.

    Args:
        beats: of the ranks that ever said something.
        limit_seconds: how long the asking rank has waited.
        now: seconds since the epoch.
    """
    late = {}
    front = max((beat.position for beat in beats.values()), default=(0, 0))
    for rank in range(world_size):
        beat = beats.get(rank)
        if beat is None:
            late[rank] = f"rank {rank} never began"
        elif now - beat.alive > limit_seconds / 2:
            late[rank] = f"rank {rank} has been silent since step {beat.step} ({now - beat.alive:.0f} s)"
        elif beat.position < front:
            late[rank] = f"rank {rank} is alive but has hung in step {beat.step + 1} for {now - beat.moved:.0f} s"
    return late


class Heartbeat(Callback):
    """Part of every RecipeTrainer; does nothing in a single process.

    Each rank notes where it is, which costs nothing; a thread puts that into the store of the process group, at most
    every 30 seconds. A rank that has not moved for 7/10 of the strategy's timeout_seconds reads where the others are.
    When some are behind, it names them in one line (the lowest of those that wait does) and ends, with exit code 142,
    so that whatever started the run can start it again. When nobody is behind, it leaves it to the process group.
    """

    def __init__(self) -> None:
        self._place, self._step, self._moved = 0, 0, time.time()
        self._stop = threading.Event()
        self._beats: dict[int, Beat] = {}
        self._asked, self._answered = False, time.monotonic()
        self._threads: list[threading.Thread] = []

    # Where this rank is ---------------------------------------------------------------------------------------------

    def _note(self, trainer: Trainer, place: int) -> None:
        self._step, self._place, self._moved = trainer.global_step, place, time.time()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size < 2 or trainer.state.fn != TrainerFn.FITTING or self._threads:
            return
        after_step(trainer, self, lambda trainer, module: self._note(trainer, _AFTER_STEP), order=-1)
        self._start(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._note(trainer, 1 + 2 * (batch_idx % max(1, int(trainer.accumulate_grad_batches))))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self._note(trainer, self._place + 1)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._note(trainer, _VALIDATION)  # ranks may have different numbers of batches

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer, _VALIDATED)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note(trainer, _ENDED)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop.set()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=1)
        self._threads = []

    # Where the others are -------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer) -> None:
        timeout = getattr(trainer.strategy, "_timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else 1800.0
        self._limit, self._pause = _SHARE * seconds, min(30.0, max(0.1, seconds / 40))
        self._rank, self._world_size = trainer.global_rank, trainer.world_size
        self._launcher = trainer.strategy.launcher
        store: Any = dist.distributed_c10d._get_default_store()
        self._note(trainer, 0)
        self._stop.clear()
        # Two: the store may not answer, when its process is the one that hangs.
        for target, arguments in ((self._exchange, (store.clone(),)), (self._watch, ())):
            thread = threading.Thread(target=target, args=arguments, name="heartbeat", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _exchange(self, store: Any) -> None:
        """Tell the others, and when asked read what they told."""
        try:
            while not self._stop.wait(self._pause):
                beat = [self._step, self._place, self._moved, time.time()]
                store.set(f"heartbeat/{self._rank}", json.dumps(beat))
                store.check([f"heartbeat/{self._rank}"])  # set does not wait for an answer
                if self._asked:
                    names = [(rank, f"heartbeat/{rank}") for rank in range(self._world_size)]
                    known = [(rank, name) for rank, name in names if store.check([name])]
                    self._beats = {rank: Beat(*json.loads(store.get(name))) for rank, name in known}
                self._answered = time.monotonic()
        except Exception:
            return  # the store is gone, and with it rank 0 or the agent; what training says about it is clearer

    def _watch(self) -> None:
        while not self._stop.wait(self._pause):
            waited = time.time() - self._moved
            if waited < self._limit:
                self._asked = False
                continue
            self._asked = True
            if time.monotonic() - self._answered > self._limit / 2:
                # With no answer from the store: it lives in rank 0 (torchrun: in its agent), and nobody else can tell.
                self._end([f"the store that rank 0 or its launcher keeps gives no answer (step {self._step})"])
            elif self._beats:
                late = verdict(self._beats, self._world_size, self._limit, time.time())
                waiting = [rank for rank in range(self._world_size) if rank not in late]
                if late and self._rank in waiting:
                    self._end(list(late.values()) if self._rank == waiting[0] else [])
                self._beats = {}

    def _end(self, phrases: list[str]) -> None:
        """End this process, and say why where that is for this rank to say."""
        if phrases:
            shown = phrases[:4] + ([f"and {len(phrases) - 4} more"] if len(phrases) > 4 else [])
            line = f"error: {'; '.join(shown)}: the other ranks wait in vain; restart with --ckpt_path auto\n"
            sys.stderr.flush()
            os.write(2, line.encode())
        for process in getattr(self._launcher, "procs", ()):
            process.kill()
        os._exit(EXIT_CODE)
