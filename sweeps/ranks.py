"""Ranks of one job on this node, watched: when one dies or hangs, all are ended and start again together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lm.errors import ConfigError
from plugins.strategies.ports import free_port

_POLL_SECONDS = 0.1
_START_SECONDS = 900.0  # imports from a cold network disk, compilation
_GRACE_SECONDS = 3.0  # for the ranks beside a failed one to say what they saw
_BAD_INPUT = 2  # exit status of recipes.pretrain: would be the same the next time


@dataclass(frozen=True)
class Job:
    """What to run, and when it is taken for hung.

    Attributes:
        processes: ranks.
        threads: of each.
        folder: for logs (rank_N.log, of all attempts) and heartbeats (heartbeat/rank_N).
        hang_seconds: no beat of any rank for so long, once there was one, means that the job is hung.
        max_restarts: times the job is started again.
        module: what each rank runs.
    """

    processes: int
    threads: int
    folder: Path
    hang_seconds: float
    max_restarts: int
    module: str = "sweeps.rank"

    @property
    def heartbeat(self) -> Path:
        return self.folder / "heartbeat"


def run_ranks(job: Job, arguments: Callable[[], Sequence[str]]) -> int:
    """Run `recipes.pretrain ARGUMENTS` in every rank until all have ended well.

    Args:
        arguments: asked for before each start, so that a restart can go on from the newest checkpoint.

    Returns:
        Restarts that were needed.

    Raises:
        ConfigError: the ranks refuse their config.
        RuntimeError: the job still fails after max_restarts; with the last lines of the rank that failed.
    """
    problem = ""
    for attempt in range(job.max_restarts + 1):
        problem = _attempt(job, list(arguments()))
        if not problem:
            return attempt
    raise RuntimeError(f"failed {job.max_restarts + 1} times, the last time: {problem}")


def _attempt(job: Job, arguments: list[str]) -> str:
    """Start all ranks and wait for them; empty when all ended well, else what happened."""
    job.folder.mkdir(parents=True, exist_ok=True)
    for path in job.heartbeat.glob("rank_*"):
        path.unlink()
    ranks: list[subprocess.Popen[bytes]] = []
    started = time.time()
    try:
        port = free_port()
        ranks = [_start(job, arguments, rank, port) for rank in range(job.processes)]
        while True:
            codes = [process.poll() for process in ranks]
            bad = next((rank for rank, code in enumerate(codes) if code), None)
            if bad is not None:
                _wait_a_little(ranks)
                return _what_happened(job, ranks, bad, codes[bad] or 0)
            if all(code == 0 for code in codes):
                return ""
            beat = _newest_beat(job.heartbeat)
            limit = job.hang_seconds if beat else max(job.hang_seconds, _START_SECONDS)
            if time.time() - max(beat, started) > limit:
                return f"hung: no rank has finished a batch for {limit:.0f} s"
            time.sleep(_POLL_SECONDS)
    finally:
        for process in ranks:  # SIGKILL also ends a process that is stopped
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _newest_beat(folder: Path) -> float:
    """Time of the last beat of any rank (plugins.callbacks.beat_files), seconds since the epoch; 0 before the first."""
    times = [0.0]
    for path in folder.glob("rank_*"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _start(job: Job, arguments: list[str], rank: int, port: int) -> subprocess.Popen[bytes]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(job.threads))
    environment = {
        **os.environ,
        **threads,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(job.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "SCALEWRIGHT_PARENT": str(os.getpid()),
    }
    with (job.folder / f"rank_{rank}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", job.module, *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _wait_a_little(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    give_up = time.monotonic() + _GRACE_SECONDS
    while any(process.poll() is None for process in ranks) and time.monotonic() < give_up:
        time.sleep(_POLL_SECONDS)


def _what_happened(job: Job, ranks: Sequence[subprocess.Popen[bytes]], bad: int, code: int) -> str:
    # A killed rank makes the others fail as well: it is the one to name.
    codes = [process.poll() for process in ranks]
    killed = next((rank for rank, status in enumerate(codes) if status is not None and status < 0), None)
    if killed is not None:
        return f"rank {killed} was ended by {signal.Signals(-(codes[killed] or 0)).name}"
    if code == _BAD_INPUT:
        errors = [
            line for rank in range(job.processes) for line in _lines(job, rank) if line.startswith("error: ")
        ]  # fmt: skip
        raise ConfigError(errors[-1].removeprefix("error: ") if errors else "the ranks refused their config")
    return f"rank {bad} ended with status {code}: " + " | ".join(_lines(job, bad)[-5:])


def _lines(job: Job, rank: int) -> list[str]:
    path = job.folder / f"rank_{rank}.log"
    return [line.strip() for line in path.read_text(errors="replace").split("\n") if line.strip()]
