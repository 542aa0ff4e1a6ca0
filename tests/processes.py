"""How tests start processes: forked from a server that has imported everything once, with a launcher's variables.

A start costs a fraction of a second and not ten. Whoever starts the first process starts the server, so there is one
list of what it imports.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from plugins.strategies.ports import free_port

_PRELOAD = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "lightning.pytorch",
    "omegaconf",  # Lightning imports it at the first save
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "sqlalchemy.dialects.sqlite",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",  # these three at its first start
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # compiles at import
    "recipes.pretrain",
    "plugins.strategies.ddp",
    "plugins.strategies.fsdp",
    "plugins.strategies.hsdp",
    "plugins.strategies.deepspeed",
    "plugins.callbacks.throughput",
]


def context() -> ForkServerContext:
    """Where to get processes and pipes from."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOAD)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return found


def end_with_parent() -> None:
    """Kill this process when the one that asked for it is gone: nobody else would. For the first line of a process.

    Linux's PR_SET_PDEATHSIG would not do: to the kernel the parent is the server, which lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def launcher_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets for process `rank` of `world_size` on one machine, that meet at `port`."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@dataclass(frozen=True)
class Done:
    """How a command ended: the first process' exit code, what all of them wrote to stderr."""

    returncode: int
    stderr: str


def pretrain(arguments: list[str], environment: dict[str, str], world_size: int = 1) -> Done:
    """`python -m recipes.pretrain ARGUMENTS` on `world_size` processes, as a launcher would start them, to its end.

    Raises:
        TimeoutError: it had not ended after 240 s.
    """
    if world_size > 1:
        arguments = [*arguments, "--trainer.devices", str(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        log, port = Path(folder) / "log", free_port()
        started = []
        for rank in range(world_size):
            launched = launcher_environment(rank, world_size, port) if world_size > 1 else {}
            started.append(start_pretrain(arguments, {**environment, **launched}, log))
        deadline = time.monotonic() + 240
        for process in started:
            process.join(max(deadline - time.monotonic(), 0))
        late = [process for process in started if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        if late:
            raise TimeoutError(log.read_text())
        return Done(started[0].exitcode or 0, log.read_text())


def start_pretrain(arguments: list[str], environment: dict[str, str], log: Path) -> Any:
    """The same as one process, left to run; stderr is appended to `log`, and stdout thrown away."""
    process = context().Process(target=_pretrain, args=(arguments, environment, log))
    process.start()
    return process


def _pretrain(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    end_with_parent()
    descriptors = os.open(os.devnull, os.O_WRONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.update(environment)
    sys.argv = ["recipes.pretrain", *arguments]
    import torch

    from recipes.pretrain import main

    torch.set_num_threads(1)
    sys.exit(main())
