"""Parts on a Ray cluster, each a task of one core; nodes need the dependencies and a path that all of them share."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from lm.data.executor import AHEAD, ATTEMPTS, SINGLE_THREADED
from lm.data.files import DataError
from plugins.executors.ray_start import QUIET, code_environment, start_ray

R = TypeVar("R")
_PACKAGES = ("lm", "plugins")  # what a part may import
_OBJECT_STORE_BYTES = 400_000_000  # results under way: AHEAD a core, a few MB each


class RayExecutor:
    """An Executor (lm.data.executor) on the cluster that RAY_ADDRESS names, or on a Ray of this machine's own.

    Tasks of a node or a worker that dies run again on another, also those whose results went down with it.

    Args:
        workers: cores of a Ray of this machine's own; a cluster has its own.

    Raises:
        ConfigError: by `with`: Ray cannot be reached or started, or has no cores.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self) -> RayExecutor:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import ray

        environment = {"env_vars": dict(SINGLE_THREADED)}
        start_ray(self.workers, _OBJECT_STORE_BYTES, environment, code_environment(_PACKAGES))
        self.workers = int(ray.cluster_resources().get("CPU", 0))
        if self.workers < 1:
            ray.shutdown()
            raise DataError("the Ray cluster has no cores; add a node")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        import ray

        ray.shutdown()

    def map(self, function: Callable[..., R], calls: Iterable[tuple[Any, ...]]) -> Iterator[R]:
        """As lm.data.executor.Executor.map."""
        import ray

        task: Any = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_part)
        folder = os.getcwd()
        under_way: deque[Any] = deque()
        for arguments in calls:
            under_way.append(task.remote(folder, function, arguments))
            if len(under_way) >= AHEAD * self.workers:
                yield _result(under_way.popleft())
        while under_way:
            yield _result(under_way.popleft())


def _part(folder: str, function: Callable[..., R], arguments: tuple[Any, ...]) -> R:
    """On a node: the part, in the folder that the command was started in, so that relative paths mean the same."""
    try:
        os.chdir(folder)
        return function(*arguments)
    except FileNotFoundError as error:
        raise DataError(
            f"{socket.gethostname()} does not see {error.filename}: start the command in a folder that all nodes share,"
            " with the output and the files of the config on shared paths too"
        ) from None


def _result(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # the function's own error, as it was raised
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        lines = [" ".join(line.split()) for line in str(error).split("\n") if line.strip()]
        raise DataError(
            f"the Ray cluster lost a part for good ({type(error).__name__}: {lines[0] if lines else ''}); the same"
            " command goes on from the last finished stage"
        ) from None
