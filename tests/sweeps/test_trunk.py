"""Mode trunk: tiny real runs. A branch is the WSD run it stands for, a killed trunk goes on, no step is done twice."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from plugins.loggers.sweep_ledger import TRUNK, SweepLedger
from sweeps.branch_points import step_of
from sweeps.config import SweepConfig, parse_config
from sweeps.grid import Cell, Corpus, build_grid
from sweeps.isoflop import read_corpus
from sweeps.job_list import jobs_of
from sweeps.jobs import Job, JobQueue
from sweeps.resume import result_rows
from sweeps.rules import Retries
from sweeps.specs import trial_spec
from sweeps.trial import run_cell, run_spec
from sweeps.trunks import Trunk, savings, trunks_of
from tests.stores import new_store


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> SweepLedger:
    return SweepLedger(new_store(tmp_path_factory.mktemp("mlflow")), "tiny")


@pytest.fixture
def plan(
    tiny_sweep: dict[str, Any], tmp_path: Path, ledger: SweepLedger, monkeypatch: pytest.MonkeyPatch
) -> tuple[SweepConfig, list[Cell], list[Trunk]]:
    """One width at three budgets and one at a single one."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger.uri)
    settings = {
        **tiny_sweep,
        "mode": "trunk",
        "budgets": {2e8: [16], 4e8: [16], 8e8: [16, 24]},
        "optim": {**tiny_sweep["optim"], "schedule": {"kind": "wsd", "decay_fraction": 0.25, "floor": 0.1}},
        "runs_dir": str(tmp_path / "runs"),
    }
    config = parse_config(settings)
    corpus = read_corpus(config.data.dir)
    cells = build_grid(config, corpus)
    return config, cells, trunks_of(cells, config, corpus)


def work(ledger: SweepLedger, config: SweepConfig, cells: list[Cell], trunks: list[Trunk], parent: str) -> list[Any]:
    """Run what jobs_of says in this process, in the queue's order: [(key, result)]."""
    queue = JobQueue.of(jobs_of(cells, trunks, config, ledger.uri, parent, {"source": "long+short"}), config.retries)
    seen = []
    while (job := queue.next()) is not None:
        if job.spec.get("branch"):
            job.spec["branch"]["trunk_status"] = queue.status_before(job)
        result = run_spec(job.spec)
        queue.ended(job.key, result)
        seen.append((job.key, result))
    assert queue.finished
    return seen


def test_a_branch_is_the_run_it_stands_for(plan: Any, ledger: SweepLedger) -> None:
    config, cells, trunks = plan
    parent = ledger.create_sweep("trunk", "grid", {}, "note")
    seen = work(ledger, config, cells, trunks, parent)
    assert [key for key, _ in seen[:1]] == [trunks[0].trunk_id] and len(seen) == 6
    rows = {row["cell_id"]: row for row in result_rows(ledger, parent, cells)}
    assert {row["status"] for row in rows.values()} == {"complete"}

    reference = ledger.create_sweep("runs", "grid", {}, "note")
    trunk = next(trunk for trunk in trunks if len(trunk.cells) == 3)
    alone = [trunk.cells[0], trunk.cells[-1]]
    for cell in alone:
        run_cell(trial_spec(cell, config, ledger.uri, reference))
    for row in result_rows(ledger, reference, alone):
        mine = rows[row["cell_id"]]
        assert row["val_loss"] < math.log(300) and row["trunk"] == ""
        compared = ("val_loss", "val_loss/long", "val_loss/short", "c_flops", "d_tokens", "global_batch_tokens", "lr")
        assert {key: mine[key] for key in compared} == {key: row[key] for key in compared}

    runs = ledger.cells(parent, TRUNK)
    assert {run.cell_id for run in runs} == {trunk.trunk_id for trunk in trunks}
    trunk_of = {cell.cell_id: trunk.trunk_id for trunk in trunks for cell in trunk.cells}
    names = {run.cell_id: run.run_id for run in runs}
    assert all(row["trunk"] == names[trunk_of[cell_id]] for cell_id, row in rows.items())
    for trunk in trunks:  # each step of the stable phase was trained once, each branch only its decay
        steps = ledger.client.get_metric_history(names[trunk.trunk_id], "loss")
        assert max(point.step for point in steps) <= trunk.steps
        for cell, start in zip(trunk.cells, trunk.starts, strict=True):
            points = ledger.client.get_metric_history(rows[cell.cell_id]["run_id"], "loss")
            assert start < min(p.step for p in points) and max(p.step for p in points) == cell.steps


class Killed(BaseException):
    """As SIGKILL: nobody catches it."""


@pytest.mark.slow
def test_a_killed_trunk_goes_on_and_only_missing_branches_run(
    plan: Any, ledger: SweepLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sweeps.branch_points import BranchPoints

    config, cells, trunks = plan
    trunk = next(trunk for trunk in trunks if len(trunk.cells) == 3)
    cells, trunks = list(trunk.cells), [trunk]
    parent = ledger.create_sweep("killed", "grid", {}, "note")
    saved: list[int] = []
    save = BranchPoints.save

    def dies(self: Any, trainer: Any, asynchronous: bool = False) -> None:
        save(self, trainer, asynchronous)
        saved.append(trainer.global_step)
        if trainer.global_step >= trunk.starts[1]:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(BranchPoints, "save", dies)
        work(ledger, config, cells, trunks, parent)
    folder = next(Path(config.runs_dir).glob("trunks/*/run/checkpoints"))
    kept = {step_of(path) for path in folder.glob("step-*")}
    assert kept == set(trunk.starts[:2]) and len(saved) > 3  # others were saved and went with the next one
    from plugins.callbacks import run_lock

    run_lock.release(folder.parent)  # a process that died has let go of it
    first = [step for step, *_ in trained_steps(ledger, parent)]
    seen = work(ledger, config, cells[1:], trunks, parent)  # the shortest was done in between, say
    assert [key for key, _ in seen] == [trunk.trunk_id, *sorted((c.cell_id for c in cells[1:]), key=order(cells))]
    assert all(result["status"] == "complete" for _, result in seen)
    (run,) = ledger.cells(parent, TRUNK)  # the same MLflow run
    steps = [step for step, *_ in trained_steps(ledger, parent)]
    assert len(steps) == len(set(steps)) and steps[: len(first)] == first
    assert run.status == "complete"

    shutil.rmtree(
        folder / f"step-{trunk.starts[0]:08d}"
    )  # lost: the trunk is trained from the start up to there, no more
    seen = dict(work(ledger, config, cells[:1], trunks, parent))
    assert {result["status"] for result in seen.values()} == {"complete"}
    assert set(trunk.starts) <= {step_of(path) for path in folder.glob("step-*")}
    rows = {row["cell_id"]: row["val_loss"] for row in result_rows(ledger, parent, cells)}
    alone = ledger.create_sweep("alone", "grid", {}, "note")
    for cell in cells:
        assert run_cell(trial_spec(cell, config, ledger.uri, alone))["val_loss"] == rows[cell.cell_id]


def order(cells: list[Cell]) -> Any:
    costs = {cell.cell_id: -cell.relative_cost for cell in cells}
    return costs.__getitem__


def trained_steps(ledger: SweepLedger, parent: str) -> list[tuple[int, float]]:
    (run,) = ledger.cells(parent, TRUNK)
    return [(point.step, point.value) for point in ledger.client.get_metric_history(run.run_id, "loss")]


def test_branches_of_a_diverged_trunk_are_rows(plan: Any, ledger: SweepLedger) -> None:
    config, cells, trunks = plan
    trunk = next(trunk for trunk in trunks if len(trunk.cells) == 3)
    parent = ledger.create_sweep("diverges", "grid", {}, "note")
    wild = dataclasses.replace(config, optim={**config.optim, "lr": 1e30})
    cells = [dataclasses.replace(cell, lr=1e30) for cell in trunk.cells]
    seen = work(ledger, wild, cells, [dataclasses.replace(trunk, cells=tuple(cells))], parent)
    assert [result["status"] for _, result in seen] == ["diverged"] * len(seen)
    rows = result_rows(ledger, parent, cells)
    assert [row["status"] for row in rows] == ["diverged"] * len(cells)
    errors = [run.tags["scalewright.error"] for run in ledger.cells(parent)]
    assert all("its trunk diverged before step" in error for error in errors)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_flops_saved_by_hand(plan: Any) -> None:
    _, cells, trunks = plan
    whole = sum(cell.flops for cell in cells)
    trained = 0.0
    for trunk in trunks:
        per_step = trunk.cells[0].flops / trunk.cells[0].steps
        decays = sum(cell.steps - start for cell, start in zip(trunk.cells, trunk.starts, strict=True))
        trained += per_step * (trunk.steps + decays)
        assert [c.steps - s for c, s in zip(trunk.cells, trunk.starts, strict=True)] == [
            round(0.25 * c.steps) for c in trunk.cells
        ]
    assert sum(trunk.trained_flops for trunk in trunks) == pytest.approx(trained)
    text = savings(trunks)
    assert f"{1 - trained / whole:.0%} saved" in text and "2 trunks and 4 branches" in text


def test_a_trunks_id_does_not_know_its_length(tiny_sweep: dict[str, Any]) -> None:
    corpus = Corpus(300, {"a": 10**6}, {"shards": "s"})
    optim = {**tiny_sweep["optim"], "schedule": {"kind": "wsd"}}
    settings = {**tiny_sweep, "mode": "trunk", "optim": optim, "batch": {"sequences": 2, "exponent": 0}}

    def ids(budgets: dict[float, list[int]], **change: Any) -> set[str]:
        config = parse_config({**settings, "warmup": {"min_steps": 5, "fraction": 0}, "budgets": budgets, **change})
        return {trunk.trunk_id for trunk in trunks_of(build_grid(config, corpus), config, corpus)}

    assert ids({4e8: [16]}) == ids({4e8: [16], 8e8: [16]})
    assert len(ids({4e8: [16]}, seeds=[0, 1])) == 2
    assert not ids({4e8: [16]}) & ids({4e8: [16]}, optim={**optim, "lr": 1e-3})
    assert ids({4e8: [16]}, mode="runs") == set()


def job(key: str, urgency: float, after: str = "") -> Job:
    return Job(key, {}, urgency, urgency, after)


def test_the_queue_waits_for_trunks_and_takes_the_most_urgent() -> None:
    queue = JobQueue.of([job("b1", 9, "t"), job("t", 10), job("u", 5), job("b2", 7, "t")], Retries())
    assert [found.key for found in (queue.next(), queue.next()) if found] == ["t", "u"]
    assert queue.next() is None and not queue.finished
    assert queue.ended("t", {"status": "diverged"})
    first, second = queue.next(), queue.next()
    assert first and second and [first.key, second.key] == ["b1", "b2"]
    assert queue.status_before(first) == "diverged"
    for key in ("b1", "b2", "u"):
        assert queue.ended(key, {"status": "complete"})
    assert queue.finished and queue.next() is None


def test_a_job_whose_process_died_starts_again_without_costing_a_retry() -> None:
    queue = JobQueue.of([job("a", 3)], Retries(failed=1), max_failures=2)
    for over in (False, False):
        assert queue.next() and queue.died("a") is over
    assert queue.next() and not queue.ended("a", {"status": "failed"})  # a failure of its own: its one retry is left
    assert queue.next() and queue.died("a") and queue.finished and queue.done == {"a": "failed"}


def test_retries_are_counted_by_kind() -> None:
    queue = JobQueue.of([job("a", 3), job("b", 2), job("c", 1)], Retries(failed=2, diverged=1))

    def tries(key: str, status: str, **more: Any) -> int:
        count = 0
        while (found := queue.next()) is not None:
            assert found.key == key
            count += 1
            if queue.ended(key, {"status": status, **more}):
                break
        return count

    assert tries("a", "failed") == 3
    assert tries("b", "diverged") == 2
    assert tries("c", "failed", again=False) == 1  # a config that is refused
    assert queue.done == {"a": "failed", "b": "diverged", "c": "failed"} and queue.finished
