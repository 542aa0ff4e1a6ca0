"""Ray for a sweep: a cluster that is already there (RAY_ADDRESS), or processes of this machine's own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from plugins.executors.ray_start import QUIET, start_ray
from sweeps.cluster import code_environment
from sweeps.rules import Resources

# Ray reads these when it is imported or started.
_QUIET = {
    **QUIET,
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the same in a trial as in the driver
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # MLflow holds the results
    "TUNE_FORCE_TRIAL_CLEANUP_S": "1",  # on Ctrl-C do not wait for a trial's long step
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
_OBJECT_STORE_BYTES = 100_000_000  # nothing large passes through it


@dataclass(frozen=True)
class Session:
    """A Ray that runs.

    Attributes:
        name: of Ray's session on this machine; empty on a cluster.
        units: cores there are, or devices where trials take any.
        unit: cores or GPUs.
        slots: trials that have room at the same time.
    """

    name: str
    units: float
    unit: str
    slots: int


@contextlib.contextmanager
def ray_session(cores: int, resources: Resources) -> Iterator[Session]:
    """Ray for the length of the block.

    Args:
        cores: CPUs of a cluster of this machine's own; a cluster that RAY_ADDRESS names keeps its own count.
        resources: of each trial.

    Raises:
        ConfigError: the cluster has no room for one trial, or cannot be reached.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    address = os.environ.get("RAY_ADDRESS")
    variables = {name: str(resources.cpus) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    code = code_environment() if address else {}
    variables |= {"RAY_CHDIR_TO_TRIAL_DIR": "0", **code.pop("env_vars", {})}
    start_ray(cores, _OBJECT_STORE_BYTES, {"env_vars": variables}, code)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a lost trial becomes a row, not a traceback
    try:
        node: Any = ray._private.worker._global_node
        session = "" if address else os.path.basename(node.get_session_dir_path())
        yield _described(session, resources)
    finally:
        ray.shutdown()


def _described(name: str, resources: Resources) -> Session:
    """What trials have room on, node by node: a trial never spans two."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    slots = 0
    for node in nodes:
        room = node.get("CPU", 0.0) / resources.trial_cpus
        if resources.gpus:
            room = min(room, node.get("GPU", 0.0) / resources.trial_gpus)
        slots += int(room + 1e-9)
    if slots == 0:
        raise ConfigError(
            f"no node has room for a trial: it takes {resources.trial_cpus} cores and {resources.trial_gpus:g} GPUs,"
            f" the {len(nodes)} nodes have {cpus:g} cores and {gpus:g} GPUs together"
        )
    return Session(name, gpus, "GPUs", slots) if resources.gpus else Session(name, cpus, "cores", slots)


def usable_cores() -> int:
    """Cores that this process may use."""
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def end_orphans(session: str) -> int:
    """Kill what a driver that was killed left behind of its own Ray session on this host; how many processes.

    Ray's processes name their session's folder in their command line, or (workers, which rename themselves) in the
    files they hold open.
    """
    if not session.startswith("session_"):
        return 0
    killed = 0
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if pid != os.getpid() and _belongs(folder, session):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def _belongs(folder: Path, session: str) -> bool:
    try:
        if folder.stat().st_uid != os.getuid():
            return False
        command = (folder / "cmdline").read_bytes()
        if f"/{session}/".encode() in command or command.rstrip(b"\0").endswith(f"/{session}".encode()):
            return b"ray" in command
        if not command.startswith(b"ray::"):
            return False
        return any(f"/{session}/" in os.readlink(link) for link in (folder / "fd").iterdir())
    except OSError:
        return False
