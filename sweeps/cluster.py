"""A sweep on a Ray cluster: the code that its nodes get, and whether each of them sees what a cell needs."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from plugins.executors import ray_start
from sweeps.config import SweepConfig
from sweeps.corpus_store import absolute, local_corpus

PACKAGES = ("conf", "lm", "plugins", "recipes", "sweeps")
_ANSWER_SECONDS = 300.0  # a node may have to unpack the code and start a Python first


def code_environment() -> dict[str, Any]:
    """What Ray's runtime_env needs to bring this checkout's packages to every node. MLflow's settings (address, user,
    token) go with it."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    return {**ray_start.code_environment(PACKAGES), "env_vars": settings}


def check_nodes(config: SweepConfig, tracking_uri: str) -> None:
    """Ask every node whether a cell could run there, before any does.

    Raises:
        ConfigError: one line with what the first node lacks, and how many lack something.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marker = _marker(config) if config.mode == "trunk" or config.resources.processes > 1 else None
    needs = {
        "data": absolute(config.data.dir),
        "manifest": hashlib.sha256(Path(local_corpus(config.data.dir), "manifest.json").read_bytes()).hexdigest(),
        "marker": None if marker is None else str(marker),
        "tracking_uri": tracking_uri,
        "host": socket.gethostname(),
    }
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    ask = ray.remote(num_cpus=0, max_retries=0)(look)
    answers = {
        node["NodeManagerHostname"] + " " + node["NodeID"][:8]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(needs)
        for node in nodes
    }
    try:
        problems = {name: _answer(ray, reference) for name, reference in answers.items()}
    finally:
        if marker is not None:
            marker.unlink(missing_ok=True)
    bad = [f"node {name} {problem}" for name, problem in problems.items() if problem]
    if bad:
        raise ConfigError(f"{bad[0]} ({len(bad)} of {len(nodes)} nodes have such a problem)")


def _answer(ray: Any, reference: Any) -> str:
    try:
        return str(ray.get(reference, timeout=_ANSWER_SECONDS))
    except Exception as error:
        lines = [line for line in str(error).split("\n") if line.strip()]
        return f"cannot run the sweep's code: {' '.join(lines[-1].split()) if lines else type(error).__name__}"


def _marker(config: SweepConfig) -> Path:
    """A file in runs_dir that only nodes which share it can see."""
    folder = Path(config.runs_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".seen-{uuid.uuid4().hex}"
    path.touch()
    return path


def look(needs: dict[str, Any]) -> str:
    """On a node: what is missing there, or an empty string."""
    data = needs["data"]
    try:
        manifest = Path(local_corpus(data), "manifest.json")
        if not manifest.is_file():
            shared = "put it on a path that all nodes share, or name a bucket (s3://...)"
            return f"does not see data.dir {data}: {shared}"
        if hashlib.sha256(manifest.read_bytes()).hexdigest() != needs["manifest"]:
            return f"has another corpus in data.dir {data} than the driver: copy it again, or share the path"
    except (ConfigError, OSError) as error:
        return f"cannot read the corpus: {error}"
    if needs["marker"] and not os.path.exists(needs["marker"]):
        folder = os.path.dirname(needs["marker"])
        return f"does not share runs_dir {folder}, where checkpoints are kept: set it to a path that all nodes share"
    if needs["tracking_uri"].startswith("sqlite") and socket.gethostname() != needs["host"]:
        return "cannot write to a SQLite file of another machine: start an MLflow server and set MLFLOW_TRACKING_URI"
    return ""
