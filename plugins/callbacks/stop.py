"""SIGTERM, SIGUSR1 and Ctrl-C: save after the step that is under way, on all ranks together, and exit."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from plugins.callbacks.checkpoint import saving_callback, tell
from plugins.callbacks.step_end import after_step

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LAUNCHER = "SCALEWRIGHT_LAUNCHER"  # pid of the process whose trainer starts the others
_LAST = 1000  # among the actions after a step: what the others save is there already


class Stopped(SystemExit):
    """The run was asked to stop, has saved, and can go on. Its code is 128 + the number of the signal, as shells and
    schedulers count: 143 for SIGTERM, 138 for SIGUSR1, 130 for Ctrl-C."""


class StopSignals:
    """Takes the place of Lightning's signal connector, whose handler calls collectives in the middle of others.

    The handler only notes the signal. After each optimizer step all ranks take the largest number that any of them
    noted: a signal that reached one process stops all, at the same step. A second signal ends the process at once.

    In a thread (a Ray trial) there are no handlers, as with Lightning's own.

    Attributes:
        noted: number of the signal that this process received, or 0.
        received_sigterm: False; Lightning's loops ask for it, and would stop without saving.
    """

    received_sigterm = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.noted = 0
        self._pid = 0
        self._before: dict[int, Any] = {}
        self._group: dist.ProcessGroup | None = None
        if "LOCAL_RANK" not in os.environ:
            os.environ[LAUNCHER] = str(os.getpid())
        # Lightning broadcasts rank 0's flag before each micro-batch; `_after_step` does more with less.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def register_signal_handlers(self) -> None:
        """Called by the Trainer when all is set up, before the first step."""
        self.noted, self._pid = 0, os.getpid()
        if self.trainer.state.fn != TrainerFn.FITTING:
            return
        after_step(self.trainer, self, self._after_step, order=_LAST)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}

    def teardown(self) -> None:
        """Called by the Trainer at the end of fit, whatever ended it."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._group = None

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            return  # a loader worker that was forked: it ends with its trainer
        if self.noted:
            self._end_at_once(number)
        self.noted = number
        name = signal.Signals(number).name
        if self.trainer.is_global_zero:
            line = f"\n{name}: saving after this step, then stopping; once more stops at once\n"
            os.write(2, line.encode())  # print may be what the signal interrupted

    def _end_at_once(self, number: int) -> None:
        launcher = self.trainer.strategy.launcher
        for process in getattr(launcher, "procs", ()):
            process.kill()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _after_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == trainer.max_steps:
            return  # what is left, a validation and a save, is what stopping would do
        number = self._agreed()
        if not number:
            return
        name = signal.Signals(number).name
        saved = saving_callback(trainer).try_to_save(trainer)
        saver = getattr(trainer.strategy, "saver", None)
        if saver is not None:
            saver.wait()  # a save that began before in the background
        for logger in trainer.loggers:
            if hasattr(logger, "stopped"):
                logger.stopped(name)
        words = "saved" if saved else "NOT saved"
        tell(trainer, f"{name}: stopped after step {trainer.global_step}, {words}; --ckpt_path auto goes on from there")
        sys.stdout.flush()
        raise Stopped(0 if self._is_launched_child() else 128 + number)

    def _agreed(self) -> int:
        """The largest number that any rank has noted."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return self.noted
        if self._group is None:  # on the CPU in any case: no need to wait for the device
            own = dist.get_backend() != "gloo"
            self._group = dist.new_group(backend="gloo") if own else dist.group.WORLD
        flag = torch.tensor([self.noted])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return int(flag)

    def _is_launched_child(self) -> bool:
        """Started by Lightning, which kills the whole run, rank 0 too, when a process that it started fails."""
        return os.environ.get(LAUNCHER) == str(os.getppid())
