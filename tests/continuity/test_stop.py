"""Signals stop all ranks at one step, with a checkpoint; a rank that hangs is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from plugins.strategies import checkpoint
from tests.continuity.launch import Job, Tracer, fit_arguments, histories

ROOT = Path(__file__).parent.parent.parent
DDP = ["--trainer.strategy", "ddp"]


def at_step(number: int):
    return lambda what, step: what == "step" and step >= number


def slow_steps(tracer: Tracer) -> None:
    """A step takes a while, so that a signal arrives in the midst of the run."""
    from lm.module import LlamaModule

    training_step = LlamaModule.training_step

    def slow(module, *args):
        time.sleep(0.05)
        return training_step(module, *args)

    LlamaModule.training_step = slow


def status(folder: Path, name: str) -> tuple[str, str | None]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    run = client.get_run((folder / "runs" / name / "mlflow_run_id").read_text().strip())
    return run.info.status, run.data.tags.get("stopped_by")


def test_signals_save_stop_and_go_on(folder: Path) -> None:
    """SIGUSR1 to the second of two ranks only, then Ctrl-C to both, then SIGTERM to one process alone, then the end."""
    name = "signals"
    exits = []
    for world_size, number, ranks in ((2, signal.SIGUSR1, [1]), (2, signal.SIGINT, [0, 1]), (1, signal.SIGTERM, [0])):
        more = DDP if world_size == 2 else []
        job = Job(folder, fit_arguments(folder, name, *more), world_size, slow_steps)
        first = 5 * (len(exits) + 1)
        assert job.wait_for(at_step(first)), job.output()
        for rank in ranks:
            os.kill(job.processes[rank].pid, number)
        exits.append(job.join())
        output = job.output()
        assert "Traceback" not in output, output
        assert status(folder, name) == ("KILLED", number.name)
        newest = checkpoint.candidates(folder / "runs" / name / "checkpoints")[0]
        step = checkpoint.read_manifest(newest)["step"]
        assert step >= first
        assert f"{number.name}: stopped after step {step}, saved; --ckpt_path auto goes on" in output
    assert exits == [[138, 138], [130, 130], [143]]
    job = Job(folder, fit_arguments(folder, name))
    assert job.join() == [0], job.output()
    assert status(folder, name)[0] == "FINISHED"
    found = histories(folder, name)
    assert sorted(found["loss"]) == list(range(1, 25))
    assert sorted(found["val_loss"]) == list(range(4, 25, 4))


def hang_in_the_save(tracer: Tracer) -> None:
    from plugins.strategies import checkpoint_io

    def save(tensors, rest, path, step):
        tracer.tell("save", step)
        time.sleep(60)

    checkpoint_io.save = save


def test_a_second_signal_stops_at_once(folder: Path) -> None:
    job = Job(folder, fit_arguments(folder, "second-signal"), 1, hang_in_the_save)
    assert job.wait_for(lambda what, step: what == "save"), job.output()
    os.kill(job.processes[0].pid, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(job.processes[0].pid, signal.SIGTERM)
    started = time.monotonic()
    assert job.join() == [-signal.SIGTERM]
    assert time.monotonic() - started < 10


class StopsItself:
    """SIGSTOP in step 6 of rank `stopped`, once its first beat is known. The other waits in that step until it has
    happened, and from there on loses patience after 4 s: however busy the machine, the stopped one is silent.
    """

    def __init__(self, stopped: int, done: Path) -> None:
        self.stopped, self.done = stopped, done

    def __call__(self, tracer: Tracer) -> None:
        from lm.module import LlamaModule
        from plugins.callbacks.heartbeat import Heartbeat

        training_step = LlamaModule.training_step

        def step(module, *args):
            if module.trainer.global_step == 5 and tracer.rank == self.stopped:
                store = torch.distributed.distributed_c10d._get_default_store()
                while not store.check([f"heartbeat/{tracer.rank}"]):
                    time.sleep(0.01)
                self.done.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            if module.trainer.global_step == 5:
                while not self.done.exists():
                    time.sleep(0.01)
                (heartbeat,) = (found for found in module.trainer.callbacks if isinstance(found, Heartbeat))
                heartbeat._limit, heartbeat._pause = 4.0, 0.1
            return training_step(module, *args)

        LlamaModule.training_step = step


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_hangs_is_named(folder: Path, tmp_path: Path, stopped: int) -> None:
    """A stopped process says nothing more; the other one ends by itself and says whom it waited for."""
    strategy = ["--trainer.strategy", "plugins.strategies.ddp.DDP", "--trainer.strategy.timeout_seconds", "80"]
    prepare = StopsItself(stopped, tmp_path / "stopped")
    job = Job(folder, fit_arguments(folder, f"hang-{stopped}", *strategy), 2, prepare)
    assert job.wait_for(at_step(5)), job.output()
    process, other = job.processes[stopped], job.processes[1 - stopped]
    other.join(timeout=120)
    os.kill(process.pid, signal.SIGKILL)
    assert job.join()[1 - stopped] == 142, job.output()
    lines = [line for line in job.output().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, job.output()
    named = "rank 1 has been silent since step" if stopped == 1 else "the store that rank 0 or its launcher keeps"
    assert named in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_processes_that_lightning_started(folder: Path, group: bool) -> None:
    """SIGTERM to the parent only, or to the whole process group, as the command line itself is run."""
    name = f"launched-{group}"
    arguments = [*fit_arguments(folder, name, *DDP), "--trainer.devices", "2", "--tokens", str(256 * 100_000)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "OMP_NUM_THREADS": "1"}
    log = folder / f"{name}.log"
    with log.open("w") as stream:
        line = [sys.executable, "-m", "recipes.pretrain", *arguments]
        parent = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while not checkpoint.candidates(folder / "runs" / name / "checkpoints") and time.monotonic() < deadline:
            assert parent.poll() is None, log.read_text()
            time.sleep(0.1)
        (child,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        if group:
            os.killpg(parent.pid, signal.SIGTERM)
        else:
            os.kill(parent.pid, signal.SIGTERM)
        assert parent.wait(timeout=60) == 143, log.read_text()
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{child}").exists()
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
    assert "Traceback" not in log.read_text()
    assert status(folder, name) == ("KILLED", "SIGTERM")
