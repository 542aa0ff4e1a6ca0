"""Runs a function on n real processes joined by gloo, as torchrun would start them.

A rank that fails or hangs takes the others down with it, and the error shows every rank's traceback.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from plugins.strategies.ports import free_port
from tests import processes

_GRACE_SECONDS = 5.0  # what the other ranks get to fail by themselves, so that their tracebacks are seen too


def run(function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 240, **kwargs: Any) -> list:
    """Call function(*args, **kwargs) in `world_size` processes and return their results in rank order.

    Args:
        function: at the top level of an importable module; arguments and result must be picklable.
        timeout_seconds: after this all processes are killed.

    Raises:
        RuntimeError: with the traceback of each rank that failed or was still running.
    """
    context, port = processes.context(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        started, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            stacks = Path(folder) / f"rank{rank}"
            process = context.Process(
                target=_main, args=(rank, world_size, port, sender, stacks, timeout_seconds, function, args, kwargs)
            )
            process.start()
            sender.close()
            started.append(process)
            pipes.append(receiver)
        try:
            outcomes = _collect(pipes, timeout_seconds)
        finally:
            for process in started:
                process.join(timeout=1)
                if process.is_alive():
                    process.kill()
                    process.join()
        return _unpack(outcomes, [Path(folder) / f"rank{rank}" for rank in range(world_size)])


def _collect(pipes: list[Connection], timeout_seconds: float) -> list[tuple[str, Any] | None]:
    """("ok", result) or ("error", traceback) of each rank; None where nothing came in time."""
    outcomes: list[tuple[str, Any] | None] = [None] * len(pipes)
    deadline = time.monotonic() + timeout_seconds
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_pipes), timeout=left):
            rank = open_pipes.pop(pipe)  # type: ignore[call-overload]
            try:
                outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                outcomes[rank] = ("error", "the process died without a word")
            if outcomes[rank][0] == "error":  # type: ignore[index]
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return outcomes


def _unpack(outcomes: list[tuple[str, Any] | None], stacks: list[Path]) -> list:
    problems = []
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            where = stacks[rank].read_text() if stacks[rank].exists() else ""
            problems.append(f"--- rank {rank}: still running when stopped\n{where}")
        elif outcome[0] == "error":
            problems.append(f"--- rank {rank}:\n{outcome[1]}")
    if problems:
        raise RuntimeError("a distributed run failed\n" + "\n".join(problems))
    return [outcome[1] for outcome in outcomes if outcome is not None]


def _main(
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
    stacks: Path,
    timeout_seconds: float,
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict,
) -> None:
    """Body of one process."""
    processes.end_with_parent()
    os.environ.update(processes.launcher_environment(rank, world_size, port))
    import torch
    import torch.distributed as dist

    # Loader workers are forked, as in a process that a user starts; inherited, each would import everything anew.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    with open(stacks, "w") as stack_file:
        faulthandler.dump_traceback_later(max(timeout_seconds - 2, 1), file=stack_file)
        try:
            outcome = ("ok", function(*args, **kwargs))
        except BaseException:
            outcome = ("error", traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
    pipe.send(outcome)
    pipe.close()
    if outcome[0] == "ok" and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
