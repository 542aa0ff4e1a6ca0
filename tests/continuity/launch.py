"""Starts real training through the command line, in processes that a test can kill, stop and read.

They are forked (tests/processes.py). What they do then is what `python -m recipes.pretrain` does in a process of its
own; SIGKILL is as final.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import yaml

from lm.data.synthetic import random_documents, write_folder
from plugins.strategies.ports import free_port
from tests import processes
from tests.stores import new_store

Prepare = Callable[["Tracer"], None]
_OF_TIME = ("tokens_per", "checkpoint", "step_seconds", "work_seconds", "mfu", "memory_gb")


class Tracer:
    """Tells the test what the process is about to do: (what, step) pairs through a pipe, from rank 0."""

    def __init__(self, rank: int, pipe: Connection | None) -> None:
        self.rank, self._pipe = rank, pipe

    def tell(self, what: str, step: int) -> None:
        if self._pipe is not None:
            self._pipe.send((what, step))

    def install(self) -> None:
        """Wrap what begins a step, a validation and a save."""
        from lm.module import LlamaModule
        from plugins.strategies import checkpoint_io

        batch_start, validation_start = LlamaModule.on_train_batch_start, LlamaModule.on_validation_epoch_start
        validation_end, save = LlamaModule.on_validation_epoch_end, checkpoint_io.save

        def on_train_batch_start(module: Any, *args: Any) -> None:
            self.tell("step", module.trainer.global_step + 1)
            batch_start(module, *args)

        def on_validation_epoch_start(module: Any) -> None:
            self.tell("validation", module.trainer.global_step)
            validation_start(module)

        def on_validation_epoch_end(module: Any) -> None:
            validation_end(module)
            self.tell("between", module.trainer.global_step)

        def traced_save(tensors: Any, rest: Any, path: Any, step: int) -> None:
            self.tell("save", step)
            save(tensors, rest, path, step)
            self.tell("between", step)

        LlamaModule.on_train_batch_start = on_train_batch_start  # type: ignore[method-assign]
        LlamaModule.on_validation_epoch_start = on_validation_epoch_start  # type: ignore[method-assign]
        LlamaModule.on_validation_epoch_end = on_validation_epoch_end  # type: ignore[method-assign]
        checkpoint_io.save = traced_save  # type: ignore[assignment]


class Job:
    """`recipes.pretrain` with the given arguments, running on `world_size` processes.

    Args:
        prepare: called in each process before it begins, to inject a fault.
    """

    def __init__(self, folder: Path, arguments: list[str], world_size: int = 1, prepare: Prepare | None = None) -> None:
        context = processes.context()
        self.log = folder / f"log-{time.monotonic_ns()}"
        self.events: list[tuple[str, int]] = []
        self._pipe, sender = context.Pipe(duplex=False)
        port = free_port()
        self.processes = [
            context.Process(
                target=_main,
                args=(rank, world_size, port, folder, arguments, self.log, sender if rank == 0 else None, prepare),
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()
        sender.close()

    def wait_for(self, condition: Callable[[str, int], bool], timeout_seconds: float = 120) -> bool:
        """Until an event comes that the condition accepts. False when the run ended without one."""
        deadline = time.monotonic() + timeout_seconds
        while (left := deadline - time.monotonic()) > 0 and wait([self._pipe], timeout=left):
            try:
                event = self._pipe.recv()
            except EOFError:
                return False
            self.events.append(event)
            if condition(*event):
                return True
        raise TimeoutError(f"nothing came within {timeout_seconds:g} s:\n{self.output()}")

    def kill(self) -> tuple[str, int]:
        """SIGKILL to all processes; returns what the first was doing."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self.join()
        return self.events[-1]

    def join(self, timeout_seconds: float = 120) -> list[int | None]:
        """Exit codes of all processes once they have ended; -9 for SIGKILL. What hangs is killed, and raises."""
        deadline = time.monotonic() + timeout_seconds
        try:
            while any(process.is_alive() for process in self.processes) and time.monotonic() < deadline:
                self._drain()
                time.sleep(0.02)
            if any(process.is_alive() for process in self.processes):
                raise TimeoutError(f"still running after {timeout_seconds:g} s:\n{self.output()}")
        finally:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        self._drain()
        return [process.exitcode for process in self.processes]

    def output(self) -> str:
        """stdout and stderr of all processes together."""
        return self.log.read_text() if self.log.exists() else ""

    def _drain(self) -> None:
        try:
            while self._pipe.poll():
                self.events.append(self._pipe.recv())
        except (EOFError, OSError):
            pass


def _main(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    arguments: list[str],
    log: Path,
    pipe: Connection | None,
    prepare: Prepare | None,
) -> None:
    """Body of one process: as if it had been started by a launcher."""
    processes.end_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    if world_size > 1:
        os.environ.update(processes.launcher_environment(rank, world_size, port))
        arguments = [*arguments, "--trainer.devices", str(world_size)]
    import torch

    torch.set_num_threads(1)
    tracer = Tracer(rank, pipe)
    tracer.install()
    if prepare is not None:
        prepare(tracer)
    from recipes.pretrain import main

    sys.argv = ["pretrain", *arguments]
    sys.exit(main())


def write_experiment(
    folder: Path,
    steps: int,
    every: int,
    validate_every: int,
    callbacks: list | None = None,
    data: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
) -> Path:
    """Two sources of random ids and a tiny model on them; 256 tokens a step.

    A test that kills, or whose ranks wait for a few seconds only, must find MLflow's tables made.
    """
    new_store(folder)
    documents = {
        name: {
            "train": random_documents(20_000, 300, 60, seed),
            "validation": random_documents(2_000, 300, 60, seed + 10),
        }
        for seed, name in enumerate(("prose", "code"))
    }
    write_folder(folder / "data", documents, vocab_size=300)
    saving = {"class_path": "plugins.callbacks.checkpoint.PeriodicCheckpoint", "init_args": {"every_n_steps": every}}
    experiment = {
        "runs_dir": str(folder / "runs"),
        "tokens": 256 * steps,
        "model": {
            "config": {"vocab_size": 300, "d_model": 32, "n_layers": 1, "n_heads": 2},
            "optim": dict(optim or {}),
        },
        "data": {
            "dir": str(folder / "data"),
            "sequence_length": 32,
            "global_batch_tokens": 256,
            "validation_windows": 32,
            "validation_batch_size": 16,
            **(data or {}),
        },
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "enable_progress_bar": False,
            "log_every_n_steps": 1,
            "val_check_interval": validate_every,
            "callbacks": [saving] if callbacks is None else callbacks,
        },
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    return folder


def fit_arguments(folder: Path, name: str, *more: str) -> list[str]:
    """The command line of a run that starts or goes on."""
    config = str(folder / "experiment.yaml")
    return ["fit", "--config", config, "--name", name, "--ckpt_path", "auto", *more]


def histories(folder: Path, name: str) -> dict[str, dict[int, float]]:
    """Metrics of a run in MLflow, {key: {step: value}}, without what depends on time.

    No point may be there twice, but on a branch that was given up.
    """
    from mlflow.tracking import MlflowClient

    from plugins.loggers.history import live, rewinds_of

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    run_id = (folder / "runs" / name / "mlflow_run_id").read_text().strip()
    result = {}
    run = client.get_run(run_id)
    rewinds = rewinds_of(run.data.tags)
    for key in run.data.metrics:
        points = client.get_metric_history(run_id, key)
        points = live(points, rewinds) if rewinds else points
        steps = [point.step for point in points]
        assert len(set(steps)) == len(steps), f"{key}: {sorted(steps)}"
        result[key] = {point.step: point.value for point in points}
    return {key: result[key] for key in sorted(result) if not key.startswith(_OF_TIME)}
