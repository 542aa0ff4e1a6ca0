"""Cells of several processes: ranks that die or hang, and a cell that ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.errors import ConfigError
from plugins.loggers.sweep_ledger import SweepLedger
from sweeps import leftovers
from sweeps.config import parse_config
from sweeps.grid import build_grid, grid_id
from sweeps.isoflop import read_corpus
from sweeps.ranks import Job, run_ranks
from sweeps.resume import result_rows
from sweeps.specs import trial_spec
from sweeps.trial import run_cell
from tests.sweeps.test_isoflop import COMPARED, ROOT, command, environment


def job(folder: Path, hang_seconds: float = 30, max_restarts: int = 1) -> Job:
    for rank in range(2):
        (folder / f"count_{rank}").write_text("0")
    return Job(2, 1, folder, hang_seconds, max_restarts, "tests.sweeps.counting_rank")


def soon(condition: Callable[[], Any], seconds: float = 60) -> Any:
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return found


def send_when(folder: Path, rank: int, number: int, how: signal.Signals) -> None:
    """Send a signal to a rank once it has counted that far."""
    soon(lambda: int((folder / f"count_{rank}").read_text() or 0) >= number)
    os.kill(int((folder / f"pid_{rank}").read_text()), how)


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("how", "hang_seconds"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 1.5)])
def test_a_rank_that_dies_or_hangs_brings_all_back(
    tmp_path: Path, how: signal.Signals, hang_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is ended as well, and both go on from where they were, on the devices that the trial was given."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    work = job(tmp_path, hang_seconds)
    sender = threading.Thread(target=send_when, args=(tmp_path, 1, 8, how))
    sender.start()
    assert run_ranks(work, lambda: [str(tmp_path)]) == 1
    sender.join()
    assert [(tmp_path / f"devices_{rank}").read_text() for rank in (0, 1)] == ["2,5 0", "2,5 1"]
    seen = [line.split() for line in (tmp_path / "seen").read_text().split("\n")[:-1]]
    for rank in "01":
        numbers = [int(number) for who, number in seen if who == rank]
        assert sorted(set(numbers)) == list(range(20))
        assert len(numbers) <= 21  # at most the one number that was cut off is counted again
        assert gone(int((tmp_path / f"pid_{rank}").read_text()))


def test_jobs_that_cannot_work_end_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such corpus"):
        run_ranks(job(tmp_path), lambda: [str(tmp_path), "refuses"])
    with pytest.raises(RuntimeError, match=r"failed 2 times.*rank 1 ended with status 1.*out of luck"):
        run_ranks(job(tmp_path), lambda: [str(tmp_path), "breaks"])


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """A Ray worker that is killed runs no `finally`."""
    code = (
        "import sys; from pathlib import Path; from sweeps.ranks import *\n"
        "run_ranks(Job(2, 1, Path(sys.argv[1]), 30, 0, 'tests.sweeps.counting_rank'), lambda: [sys.argv[1]])"
    )
    job(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) as parent:
        pids = [soon(lambda rank=rank: (p := tmp_path / f"pid_{rank}").exists() and p.read_text()) for rank in (0, 1)]
        parent.kill()
    for pid in pids:
        soon(lambda pid=pid: gone(int(pid)), 10)


def test_leftovers_of_dead_workers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed worker's folder goes, a living one's stays, and so does one that nothing is known about."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(leftovers.tempfile, "tempdir", None)
    hold = "with cell_folder() as folder: print(folder, flush=True); time.sleep(99)"
    code = f"import time; from sweeps.leftovers import cell_folder\n{hold}"
    line = [sys.executable, "-c", code]
    workers = [subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, alive = (Path(worker.stdout.readline().strip()) for worker in workers)  # type: ignore[union-attr]
        unknown = tmp_path / "scalewright-cell-old"
        unknown.mkdir()
        assert leftovers.remove_leftovers() == 0
        workers[0].kill()
        workers[0].wait()
        assert leftovers.remove_leftovers() == 1
        assert not dead.exists() and alive.exists() and unknown.exists()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    with leftovers.cell_folder() as own:
        assert own.exists()
    assert not own.exists()


@pytest.mark.parametrize(
    ("resources", "word"), [({"processes": 0}, "processes"), ({"processes": 2, "gpus": 0.5}, "whole gpus")]
)
def test_resources_that_cannot_be(tiny_sweep: dict[str, Any], resources: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        parse_config({**tiny_sweep, "resources": resources})


# -- whole sweeps ------------------------------------------------------------------------------------------------------


def sweep_of_one(folder: Path, tiny_sweep: dict[str, Any]) -> dict[str, Any]:
    settings = {
        **tiny_sweep,
        "budgets": {4e9: [16]},
        "runs_dir": str(folder / "runs"),
        "resources": {"processes": 2, "strategy": "ddp", "hang_seconds": 20},
    }
    folder.mkdir()
    (folder / "sweep.yaml").write_text(yaml.safe_dump(settings))
    return settings


def row(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    store = SweepLedger(f"sqlite:///{folder / 'mlflow.db'}", "tiny")
    (parent,) = store.sweeps("tiny")
    config = parse_config(settings)
    (found,) = result_rows(store, parent.run_id, build_grid(config, read_corpus(config.data.dir)))
    assert [run.status for run in store.cells(parent.run_id)] == ["complete"]  # one MLflow run through it all
    points = store.client.get_metric_history(found["run_id"], "loss")
    assert len({point.step for point in points}) == len(points) > 20
    return {key: found[key] for key in COMPARED} | {"loss": {point.step: point.value for point in points}}


def rank_pids(folder: Path) -> list[int]:
    """Of the ranks of this folder's sweep, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"sweeps.rank" in words and any(word.startswith(bytes(folder)) for word in words):
                pairs = (process / "environ").read_bytes().split(b"\0")
                found[next(int(pair[5:]) for pair in pairs if pair.startswith(b"RANK="))] = int(process.name)
        except OSError:
            continue
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_cell_of_two_processes_survives_killed_and_hung_ranks(
    tmp_path: Path, tiny_sweep: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real sweep with one cell of ddp x 2: rank 1 is killed, later rank 0 is stopped for ever. Nobody types anything,
    and the result is that of an undisturbed sweep, to the last bit."""
    quiet = sweep_of_one(tmp_path / "quiet", tiny_sweep)
    ledger = SweepLedger(f"sqlite:///{tmp_path / 'quiet' / 'mlflow.db'}", "tiny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger.uri)
    config = parse_config(quiet)
    (cell,) = build_grid(config, read_corpus(config.data.dir))
    parent = ledger.create_sweep("tiny", grid_id([cell]), {}, "note")
    result = run_cell(trial_spec(cell, config, ledger.uri, parent))  # as a trial, without Ray around it
    assert result["status"] == "complete", result

    folder = tmp_path / "hard"
    hard = sweep_of_one(folder, tiny_sweep)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command(folder, "--cores", "2"), cwd=folder, env=environment(), stdout=log, stderr=log
        )

    def checkpoints() -> int:
        assert process.poll() is None, (folder / "log").read_text()
        names = [path.name for path in folder.glob("runs/cells/*/run/checkpoints/step-*")]
        return max((int(name[5:]) for name in names), default=0)

    try:
        soon(checkpoints, 600)
        before = rank_pids(folder)
        os.kill(before[1], signal.SIGKILL)
        soon(lambda: len(rank_pids(folder)) == 2 and not set(rank_pids(folder)) & set(before), 600)
        first = checkpoints()
        soon(lambda: checkpoints() > first, 600)
        os.kill(rank_pids(folder)[0], signal.SIGSTOP)
        assert process.wait(timeout=900) == 0, (folder / "log").read_text()
    finally:
        process.kill()
    assert row(folder, hard) == row(tmp_path / "quiet", quiet)
    assert "failed" not in (folder / "log").read_text()
    assert not list((folder / "runs/cells").iterdir())  # checkpoints live as long as the cell runs
