"""A run's dashboard is drawn from its MLflow run; configs add callbacks; a broken rank ends the command in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.test_pretrain import folder, history, one_error, pretrain, pretrain_as_typed  # noqa: F401

RUN = ["--config", "conf/callbacks/dashboard.yaml", "--config", "conf/callbacks/samples.yaml"]


def test_a_run_with_callbacks_from_config_is_drawn(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from plugins.loggers.read_run import metric_history
    from recipes.dashboard import _series, main

    done = pretrain(folder, "--name", "shown", *RUN, "--config", "conf/callbacks/integrity.yaml")
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    recorded = metric_history(str(folder / "runs" / "shown"))
    for name in ("loss/prose", "update_ratio/block_00", "attention_logit/block_00", "log_z", "tokens_per_s"):
        assert dict(recorded[name]) == history(folder, "shown", name)
    assert [step for step, _ in recorded["grad_norm/head"]] == [10]
    assert list(_series(recorded, ("loss",)))[-1] == "validation" and "memory_gb" in recorded
    assert (folder / "runs/shown/samples/step-00000016.txt").read_text().startswith("=== In the beginning\n")

    assert main([str(folder / "runs" / "shown"), "--out", str(folder / "shown.png")]) == 0
    assert (folder / "shown.png").read_bytes()[:4] == b"\x89PNG"
    assert main([str(folder), "--out", str(folder / "no.png")]) == 2
    assert main(["0123", "--out", str(folder / "no.png")]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "no file mlflow_run_id" in errors[0] and "no MLflow run 0123" in errors[1]


@pytest.mark.slow
def test_a_broken_rank_ends_the_command_in_one_line(folder: Path) -> None:  # noqa: F811
    """Status 2 from the process that started the others, and nothing saved of that state."""
    flip = "{class_path: tests.distributed.dashboard_jobs.Flip, init_args: {step: 8, rank: 1, name: model.norm.weight}}"
    done = pretrain_as_typed(
        folder, "--name", "broken", "--trainer.devices", "2", "--trainer.callbacks+", flip,
        "--config", "conf/callbacks/integrity.yaml",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    error = one_error(done.stderr)
    assert "at step 8" in error and "param/model.norm.weight" in error
    assert not list((folder / "runs" / "broken").glob("checkpoints/step-*"))


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.dashboard import main

    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "recipes.dashboard runs/small" in capsys.readouterr().out
