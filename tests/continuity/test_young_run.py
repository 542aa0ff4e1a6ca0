"""YoungCheckpoint in a real run of two ranks, killed once: intervals as recorded, permanent ones, failures counted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from plugins.callbacks.young_checkpoint import young_interval_seconds
from tests.continuity.launch import Job, fit_arguments, histories

RATE = 86400 * 5.0  # a failure each .1 s of two devices: saves come every few steps
YOUNG = (
    "[{class_path: plugins.callbacks.young_checkpoint.YoungCheckpoint, init_args: {failures_per_device_day: RATE,"
    " first_step: 3, keep: 1, permanent_every_tokens: 2048, time_limit_seconds: 0.001}}]"
)
YOUNG = YOUNG.replace("RATE", f"{RATE:g}")


def recorded(folder: Path, name: str) -> dict[str, dict[int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    run_id = (folder / "runs" / name / "mlflow_run_id").read_text().strip()
    keys = ("blocked_seconds", "mtbf_seconds", "interval_steps")
    return {
        key: {point.step: point.value for point in client.get_metric_history(run_id, f"checkpoint/{key}")}
        for key in keys
    }


def test_a_run_saves_as_often_as_pays(folder: Path) -> None:
    arguments = fit_arguments(folder, "young", "--trainer.strategy", "ddp", "--trainer.callbacks", YOUNG)
    job = Job(folder, arguments, 2)
    assert job.wait_for(lambda what, step: what == "step" and step == 10), job.output()
    job.kill()
    again = Job(folder, arguments, 2)
    assert again.join() == [0, 0], again.output()
    uptime = json.loads((folder / "runs" / "young" / "uptime.json").read_text())
    assert uptime["failures"] == 1 and not uptime["running"] and uptime["seconds"] > 0

    saves = [step for what, step in job.events if what == "save"]
    assert saves[0] == 1  # the time limit is near from the first step on, and told once
    values = recorded(folder, "young")
    for step, following in itertools.pairwise(saves):
        assert following == min(step + values["interval_steps"][step], 24)
    first = values["mtbf_seconds"][1]
    assert first > 0.1  # 86400 / RATE / 2 devices, and what the run has run so far
    spans = [young_interval_seconds(values["blocked_seconds"][s], values["mtbf_seconds"][s]) for s in saves[:-1]]
    assert all(span > 0 for span in spans)

    kept = sorted(int(path.name[5:]) for path in (folder / "runs" / "young" / "checkpoints").glob("step-*"))
    done = {
        step
        for events in (job.events, again.events)
        for (what, step), (after, _) in itertools.pairwise(events)
        if what == "save" and after == "between"
    }
    firsts = {min(step for step in done if step // 8 == span) for span in {step // 8 for step in done} - {0}}
    assert set(kept) == firsts | {24}
    assert histories(folder, "young")["loss"].keys() == set(range(1, 25))


def test_in_the_background_only_the_copy_counts(folder: Path) -> None:
    callbacks = YOUNG.replace("first_step: 3", "first_step: 3, asynchronous: true")
    job = Job(folder, fit_arguments(folder, "young-background", "--trainer.callbacks", callbacks), 1, slow_writes)
    assert job.join() == [0], job.output()
    blocked = recorded(folder, "young-background")["blocked_seconds"]
    assert 0 < blocked[1] < 0.5  # the write takes a second longer


def slow_writes(tracer) -> None:
    import time

    from plugins.strategies import checkpoint_io

    write = checkpoint_io.write

    def slow(*args):
        time.sleep(1.0)
        write(*args)

    checkpoint_io.write = slow
