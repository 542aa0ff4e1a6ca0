"""Where the parts of a long computation run: in this process, or in several of this machine's; Ray is in plugins.

A part is a call of a function that is found by its name, with arguments that can be pickled and a result that depends
on them alone: so it may run anywhere, and again where whoever ran it died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeVar

from lm.data.files import DataError

R = TypeVar("R")
ATTEMPTS = 4  # of a part whose worker dies
# One thread a library: there are as many workers as cores.
SINGLE_THREADED = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}
AHEAD = 2  # parts a worker that are under way or wait to be taken, so that results do not pile up


class Executor(Protocol):
    """Runs parts.

    Attributes:
        workers: parts that run at the same time.
    """

    workers: int

    def map(self, function: Callable[..., R], calls: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """function(*arguments) of each call, in the order of the calls, whoever is done first.

        Raises:
            DataError: of the function, or workers die again and again over one part.
        """
        ...


class Serial:
    """In this process, one part after the other."""

    workers = 1

    def map(self, function: Callable[..., R], calls: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """As Executor.map; a part runs when its result is asked for."""
        return (function(*arguments) for arguments in calls)


class Processes:
    """Processes of this machine. They are spawned, not forked: a fork copies locks that other threads hold.

    Args:
        workers: processes, at least 1.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._pool is None:
            return
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        for process in processes if kind is not None else ():  # nobody waits for what they are at
            process.terminate()
        self._pool = None

    def map(self, function: Callable[..., R], calls: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """As Executor.map. A part whose process died (killed, out of memory) runs again in another."""
        under_way: deque[tuple[tuple[Any, ...], Future[R]]] = deque()
        attempts = 1
        for arguments in _then_none(calls):
            if arguments is not None:
                under_way.append((arguments, self._submit(function, arguments)))
            while under_way and (arguments is None or len(under_way) >= AHEAD * self.workers):
                try:
                    result = under_way[0][1].result()
                except BrokenProcessPool:
                    if attempts == ATTEMPTS:
                        raise DataError(
                            f"worker processes died {ATTEMPTS} times over the same part (killed, or out of memory);"
                            " free some memory or set fewer workers, and start the same command again"
                        ) from None
                    attempts += 1
                    self._pool = None
                    under_way = deque((old, self._submit(function, old)) for old, _ in under_way)
                    continue
                under_way.popleft()
                attempts = 1
                yield result

    def _submit(self, function: Callable[..., R], arguments: tuple[Any, ...]) -> Future[R]:
        for _ in range(2):
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_start_worker)
            try:
                return self._pool.submit(function, *arguments)
            except BrokenProcessPool:  # noticed only now: what was under way is asked for again by `map`
                self._pool = None
        raise DataError("worker processes die as soon as they start; see what ends them (memory, limits of processes)")


def _then_none(calls: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...] | None]:
    yield from calls
    yield None


def _start_worker() -> None:
    """In a new worker: one thread, Ctrl-C is the driver's, and nobody stays when the driver is gone (SIGKILL)."""
    os.environ.update(SINGLE_THREADED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
