"""Two processes must not train in one run folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plugins.callbacks import run_lock
from recipes.run_record import RunRecord
from tests.continuity.launch import Job, fit_arguments, write_experiment

HOLD = """
import sys
from pathlib import Path
from plugins.callbacks import run_lock
run_lock.WAIT_SECONDS = 0
print(run_lock.hold(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def impatient(tracer) -> None:
    run_lock.WAIT_SECONDS = 0.5


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None and first.stdout.readline() == b"None\n"
    second = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], input="", capture_output=True, text=True)
    assert "another process trains in" in second.stdout
    first.kill()
    first.wait()
    assert run_lock.hold(tmp_path) is None  # SIGKILL let go of it
    assert run_lock.hold(tmp_path) is None
    run_lock.release(tmp_path)


def test_a_run_that_is_being_trained_is_left_alone(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path, steps=4, every=2, validate_every=4)
    run = folder / "runs" / "busy"
    assert Job(folder, fit_arguments(folder, "busy")).join() == [0]
    damaged = run / "checkpoints" / "step-00000004" / "state.pt"
    damaged.write_bytes(b"written by the other process at this moment")
    journal = (run / "metrics.jsonl").read_bytes()
    assert run_lock.hold(run) is None
    try:
        job = Job(folder, fit_arguments(folder, "busy"), prepare=impatient)
        assert job.join() == [2]
        assert "another process trains in" in job.output() and "Traceback" not in job.output()
        assert damaged.exists(), "set aside under the feet of the other process"
        assert (run / "metrics.jsonl").read_bytes() == journal
    finally:
        run_lock.release(run)


def test_a_run_that_began_since_it_was_looked_for_is_not_begun_again(tmp_path: Path) -> None:
    """Whether the first process writes its config before the second asks for the lock, or while that one waits."""
    parser: Any = SimpleNamespace(dump=lambda config, skip_none: config)
    trainer = SimpleNamespace(default_root_dir=str(tmp_path), loggers=[], known=False)
    (tmp_path / "config.yaml").write_text("of the first")
    try:
        problem = RunRecord(parser, "of the second")._record(trainer, None)  # type: ignore[arg-type]
        assert problem is not None and f"another process began the run in {tmp_path} at this moment" in problem
        assert (tmp_path / "config.yaml").read_text() == "of the first"
        trainer.known = True  # a start that goes on from it
        assert RunRecord(parser, "of the second")._record(trainer, None) is None  # type: ignore[arg-type]
        assert (tmp_path / "config.yaml").read_text() == "of the second"
    finally:
        run_lock.release(tmp_path)
