"""Checkpoints written beside training: copied at once, written by a thread, one at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.strategies import checkpoint_io, collectives


@dataclass(frozen=True)
class InBackground:
    """As storage_options of Trainer.save_checkpoint: return when the state is copied, write it while training goes on.

    Attributes:
        then: called on rank 0, in the writing thread, once the checkpoint is complete under its name.
    """

    then: Callable[[], None] | None = None


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread, with collectives on a gloo group of its own.

    On the default group the thread's collectives would mix with those of training, and hang.

    Attributes:
        failures: saves that failed. Each was reported; the run goes on and older checkpoints stay.
    """

    def __init__(self) -> None:
        self.failures = 0
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = None

    def start(
        self, tensors: dict[str, Tensor], rest: dict[str, Any], path: Path, step: int, options: InBackground
    ) -> None:
        """Copy the state to CPU memory and begin to write it, after the save before it is done. Collective.

        Args: as of checkpoint_io.save; `tensors` is emptied.

        Raises:
            CheckpointError: on all ranks; the state cannot be written safely. What happens later is reported only.
        """
        self.wait()
        if self._group is None and collectives.is_distributed():
            self._group = dist.new_group(backend="gloo")
        data = checkpoint_io.serialize(rest, path)
        staged = stage(tensors)
        # No daemon: a process that ends by itself finishes the write first.
        # A thread starts on device 0, where torch's writer would open a context of its own on every rank.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        arguments = (staged, data, path, step, options, device)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until no save is under way. Not collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        tensors: dict[str, Tensor],
        data: bytes,
        path: Path,
        step: int,
        options: InBackground,
        device: int | None,
    ) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            checkpoint_io.write(tensors, data, path, step, self._group)
            if options.then is not None and collectives.rank() == 0:
                options.then()
        except Exception as error:
            self.failures += 1
            if collectives.rank() == 0:
                line = f"warning: {collectives.one_line(error)}; the run goes on, older checkpoints stay"
                print(line, file=sys.stderr, flush=True)


def stage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory that later steps do not change; a DTensor stays one. Empties its argument as it goes."""
    staged = {}
    while tensors:
        key, tensor = tensors.popitem()
        staged[key] = tensor.detach().to("cpu", copy=True)
    return dict(reversed(staged.items()))
