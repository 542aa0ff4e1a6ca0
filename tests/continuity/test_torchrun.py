"""torchrun starts the job again after a kill and after a hang, and it goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plugins.strategies import checkpoint
from tests.continuity.launch import Job, fit_arguments, histories

ROOT = Path(__file__).parent.parent.parent
STRATEGY = ["--trainer.strategy", "plugins.strategies.ddp.DDP", "--trainer.strategy.timeout_seconds", "20"]


def children(pid: int) -> list[int]:
    """Processes that `pid` started, oldest first; its workers in rank order."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in listed)


def wait_for_step(run: Path, step: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        found = checkpoint.candidates(run / "checkpoints")
        if found and int(found[0].name.rpartition("-")[2]) >= step:
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise TimeoutError(log.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_and_a_hung_rank_bring_the_job_back(folder: Path) -> None:
    length = ["--tokens", str(256 * 200)]
    whole = Job(folder, fit_arguments(folder, "long", "--trainer.strategy", "ddp", *length), 2)
    assert whole.join(300) == [0, 0], whole.output()
    log = folder / "torchrun.log"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    line += ["-m", "recipes.pretrain", *fit_arguments(folder, "elastic", *STRATEGY, *length), "--trainer.devices", "2"]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "OMP_NUM_THREADS": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=stream, stderr=stream)
    try:
        run = folder / "runs" / "elastic"
        wait_for_step(run, 40, process, log)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        time.sleep(3)
        reached = int(checkpoint.candidates(run / "checkpoints")[0].name.rpartition("-")[2])
        wait_for_step(run, reached + 30, process, log)
        os.kill(children(process.pid)[1], signal.SIGSTOP)
        assert process.wait(timeout=500) == 0, log.read_text()
    finally:
        for pid in children(process.pid) if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    assert "error: rank 1 has been silent since step" in log.read_text()
    ends = [folder / "runs" / name / "checkpoints" / "step-00000200" for name in ("long", "elastic")]
    files = [checkpoint.read_manifest(path)["files"] for path in ends]
    for shard in ("__0_0.distcp", "__1_0.distcp"):
        assert files[0][shard] == files[1][shard], shard
    assert histories(folder, "elastic") == histories(folder, "long")
