"""The spike guard through the command line, on two processes: appended by a config, it goes back, and stops."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.recipes.test_pretrain import ROOT, folder, mlflow_run, one_error, pretrain  # noqa: F401


def test_a_run_that_does_not_recover_stops_with_one_line(folder: Path) -> None:  # noqa: F811
    """From step 10 on every norm passes a hundredth of its average: back to step 8, once, and then the end."""
    text = (ROOT / "conf/callbacks/spike_guard.yaml").read_text()
    config = yaml.safe_load(text)
    (added,) = config["trainer"]["callbacks+"]
    added["init_args"] |= {"rule": "ema", "threshold": 0.01, "warmup": 9, "strikes": 3, "max_roll_backs": 1}
    (folder / "guard.yaml").write_text(yaml.safe_dump(config))
    done = pretrain(folder, "--name", "spiky", "--config", str(folder / "guard.yaml"), world_size=2)
    assert done.returncode == 2, done.stderr
    error = one_error(done.stderr)
    assert "spike guard: stopped at step 12: new strikes from step 10 after 1 roll-backs" in error
    assert "checkpoint of step 8 is left" in error and "the struck samples are from" in error
    lines = [line for line in done.stderr.splitlines() if line.startswith("spike guard:")]
    assert [line.split(":")[1] for line in lines if "skipped: grad_norm" in line] == [
        f" step {step} skipped" for step in (10, 11, 12, 10, 11, 12)
    ]
    assert sum("back from step 12 to" in line for line in lines) == 1 and len(lines) == 7
    assert [path.name for path in (folder / "runs/spiky/checkpoints").glob("step-*")] == ["step-00000008"]
    recorded = json.loads((folder / "runs/spiky/spike_guard.json").read_text())
    assert [(back["first_strike"], back["to_step"]) for back in recorded["roll_backs"]] == [(9, 8)]
    run = mlflow_run(folder, "spiky")
    assert run.info.status == "FAILED" and run.data.tags["spike_guard.roll_backs"] == "1"
    assert f"samples [{recorded['skipped'][0][0]}, " in run.data.tags["spike_guard.dropped"]
    assert run.data.metrics["spike/skipped_steps"] == 3 and run.data.metrics["spike/roll_backs"] == 1
