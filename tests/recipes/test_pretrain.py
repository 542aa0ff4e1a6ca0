"""The command line on a small real corpus: a run, its resume, and one clear line for each mistake."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lm.data.synthetic import random_documents, write_folder
from tests import processes
from tests.processes import Done

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of random ids and an experiment on them."""
    folder = tmp_path_factory.mktemp("pretrain")
    documents = {
        name: {
            "train": random_documents(40_000, 300, 60, seed),
            "validation": random_documents(2_000, 300, 60, seed + 10),
        }
        for seed, name in enumerate(("prose", "code"))
    }
    write_folder(folder / "data", documents, vocab_size=300)
    experiment = {
        "name": "small",
        "runs_dir": str(folder / "runs"),
        "tokens": 4096,
        "model": {"config": {"vocab_size": 300, "d_model": 32, "n_layers": 1, "n_heads": 2}},
        "data": {
            "dir": str(folder / "data"),
            "sequence_length": 32,
            "global_batch_tokens": 256,
            "validation_windows": 8,
        },
        "trainer": {
            "accelerator": "cpu",
            "log_every_n_steps": 4,
            "val_check_interval": 8,
            "callbacks": [
                {"class_path": "plugins.callbacks.throughput.Throughput"},
                {"class_path": "plugins.callbacks.checkpoint.PeriodicCheckpoint", "init_args": {"every_n_steps": 8}},
            ],
        },
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))
    return folder


def pretrain(folder: Path, *arguments: str, command: str = "fit", world_size: int = 1, uri: str = "") -> Done:
    """The command in forked processes; `uri` of MLflow, a database in the folder by default."""
    line = [command, "--config", str(folder / "experiment.yaml"), *arguments]
    environment = {"MLFLOW_TRACKING_URI": uri or f"sqlite:///{folder}/mlflow.db"}
    return processes.pretrain(line, environment, world_size)


def pretrain_as_typed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it: all is imported anew, and Lightning starts the other processes."""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "recipes.pretrain", "fit", "--config", str(folder / "experiment.yaml"), *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def mlflow_run(folder: Path, run: str) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    return client.get_run((folder / "runs" / run / "mlflow_run_id").read_text().strip())


def history(folder: Path, run: str, key: str) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    run_id = (folder / "runs" / run / "mlflow_run_id").read_text().strip()
    points = client.get_metric_history(run_id, key)
    assert len({point.step for point in points}) == len(points)
    return {point.step: point.value for point in points}


def test_fit_then_resume_under_another_strategy(folder: Path) -> None:
    """8 + 8 steps with a change from one process to fsdp on two are the same run as 16 steps at once."""
    whole = pretrain(folder, "--name", "whole")
    assert whole.returncode == 0, whole.stderr
    assert sorted(p.name for p in (folder / "runs/whole/checkpoints").iterdir()) == ["step-00000008", "step-00000016"]
    config = yaml.safe_load((folder / "runs/whole/config.yaml").read_text())
    assert config["model"]["config"]["d_model"] == 32 and config["trainer"]["max_steps"] == 16
    line = "picked 32-true, no compilation: d_model 32 is below 256 on a CPU"
    assert whole.stderr.count(line) == 1
    assert config["trainer"]["precision"] == "32-true" and config["model"]["runtime"]["compile"] is False
    params = mlflow_run(folder, "whole").data.params
    assert (params["precision"], params["compile"], params["precision_choice"]) == ("32-true", "False", line)
    losses = history(folder, "whole", "loss")
    assert list(losses) == [4, 8, 12, 16]
    for key in ("val_loss", "val_loss/prose", "bpb/code", "bpb"):
        assert list(history(folder, "whole", key)) == [8, 16]
    for key in ("lr", "grad_norm", "tokens", "tokens_per_s", "flops"):
        assert list(history(folder, "whole", key)) == [4, 8, 12, 16]

    # The last checkpoint is torn by hand: the one before it is taken, under another strategy.
    newest = folder / "runs/whole/checkpoints/step-00000016"
    (newest / "manifest.json").unlink()
    spread = ("--trainer.strategy", "fsdp", "--trainer.devices", "2")
    again = pretrain_as_typed(folder, "--name", "whole", "--ckpt_path", "last", *spread)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("picked 32-true") == 1  # by the first of two processes
    assert history(folder, "whole", "loss") == losses
    assert json.loads((newest / "manifest.json").read_text())["step"] == 16

    taken = pretrain(folder, "--name", "whole")
    assert taken.returncode == 2
    assert "already holds a run" in taken.stderr and "--ckpt_path last" in taken.stderr

    checked = pretrain(folder, "--name", "whole", "--ckpt_path", "last", command="validate")
    assert checked.returncode == 0, checked.stderr


def one_error(stderr: str) -> str:
    assert "Traceback" not in stderr
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    return errors[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.weights", "{prose: 1, poetry: 1}"], ["poetry", "prose, code"]),
        (["--data.weights", "{prose: 1, prose: 2}"], ["data.weights", "'prose' comes twice"]),
        (["--model.config.vocab_size", "512"], ["512", "300"]),
        (
            ["--data.sequence_length", "65536", "--data.global_batch_tokens", "65536", "--tokens", "65536"],
            ["longer", "shorten"],
        ),
        (["--data.global_batch_tokens", "224", "--data.micro_batch_size", "2"], ["micro_batch_size 2", "1, 7"]),
        (["--data.dir", "nowhere"], ["nowhere", "recipes.data prepare"]),
        (["--tokens", "0"], ["set tokens"]),
        (["--ckpt_path", "last"], ["no run", "continue"]),
        (["--model.config.n_heads", "5"], ["n_heads"]),
        (["--no_such_key", "1"], ["no_such_key"]),
        (["--trainer.strategy", "fsdq"], ["fsdq"]),
        (["--trainer.precision", "16-mixed"], ["16-mixed", "bf16-mixed"]),
        (["--data.global_batch_tokens", "0"], ["data.global_batch_tokens", "at least 1"]),
        (["--data.micro_batch_size", "-1"], ["data.micro_batch_size", "at least 1"]),
        (["--data.validation_windows", "0"], ["data.validation_windows", "at least 1"]),
        (["--data.num_workers", "-1"], ["data.num_workers"]),
        (["--data.seed", "-1"], ["data.seed"]),
        (["--seed_everything", "-5"], ["seed_everything"]),
        (["--tokens", "5"], ["tokens 5", "one optimizer step"]),
        (["--trainer.devices", "abc"], ["trainer.devices", "'abc'"]),
        (["--trainer.devices", "0"], ["trainer.devices"]),
        (["--trainer.accelerator", "tpuu"], ["trainer.accelerator", "tpuu"]),
        (["--trainer.val_check_interval", "0"], ["trainer.val_check_interval"]),
        (["--trainer.val_check_interval", "0.5"], ["trainer.val_check_interval", "whole number"]),
        (["--trainer.log_every_n_steps", "0"], ["trainer.log_every_n_steps"]),
        (["--trainer.gradient_clip_val", "-1"], ["trainer.gradient_clip_val"]),
        (["--trainer.accumulate_grad_batches", "8"], ["data.micro_batch_size"]),
        (["--model.optim.schedule.kind", "cooldown"], ["cooldown", "--ckpt_path"]),
        (["--name", "../elsewhere"], ["'../elsewhere'", "runs_dir"]),
        (["--trainer.max_epochs", "-7"], ["max_epochs"]),
        (["--runs_dir", "/proc/nowhere"], ["cannot write", "runs_dir"]),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path,
    arguments: list[str],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from recipes.pretrain import main

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    line = ["pretrain", "fit", "--config", str(folder / "experiment.yaml"), "--name", "mistake", *arguments]
    monkeypatch.setattr(sys, "argv", line)
    # Lightning's log handler holds the stderr of the first test, which is closed by now.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert main() == 2
    assert not (folder / "runs" / "mistake").exists()
    error = one_error(capfd.readouterr().err)
    for word in words:
        assert word in error


@pytest.mark.parametrize("kind", ["server", "database", "folder"])
def test_records_that_cannot_be_kept_are_refused_before_there_is_a_run(folder: Path, kind: str) -> None:
    """Also by all of several processes, soon: the others must not wait for the one that found out."""
    (folder / "garbage.db").write_bytes(b"no database" * 100)
    uri = {
        "server": "http://127.0.0.1:9",
        "database": f"sqlite:///{folder}/garbage.db",
        "folder": "sqlite:////nowhere/at/all/mlflow.db",
    }[kind]
    world_size, strategy = (2, "ddp") if kind == "server" else (1, "single")
    done = pretrain(folder, "--name", "mistake", "--trainer.strategy", strategy, world_size=world_size, uri=uri)
    assert done.returncode == 2, done.stderr
    assert uri.removeprefix("sqlite:///") in one_error(done.stderr)
    assert not (folder / "runs" / "mistake").exists()


def test_the_last_line_has_the_last_losses(folder: Path) -> None:
    bar = "[{class_path: plugins.callbacks.progress.StepProgress}]"
    done = pretrain(folder, "--name", "told", "--trainer.callbacks", bar, "--trainer.max_steps", "3")
    assert done.returncode == 0, done.stderr
    assert "trainer.max_steps 3 gives way to tokens 4096: 16 steps" in done.stderr
    loss, val_loss = history(folder, "told", "loss")[16], history(folder, "told", "val_loss")[16]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("step 16/16")]
    assert f"loss {loss:.4f}" in line and f"val {val_loss:.4f}" in line
    assert f"run {folder / 'runs' / 'told'}" in done.stderr


def test_a_world_size_that_does_not_divide_the_batch(folder: Path) -> None:
    done = pretrain(folder, "--name", "mistake", "--data.global_batch_tokens", "224", world_size=2)
    assert done.returncode == 2, done.stderr
    error = one_error(done.stderr)
    assert "7 windows" in error and "process counts that work: 1, 7" in error


def test_help_explains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.pretrain import main

    monkeypatch.setattr(sys, "argv", ["pretrain", "fit", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for text in ("--trainer.strategy", "--data.global_batch_tokens", "tokens an optimizer step", "--ckpt_path"):
        assert text in told
    assert told.startswith("usage: python -m recipes.pretrain ") and "Train a run" in told


def test_a_warmup_longer_than_the_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from recipes.checks import set_max_steps

    optim = SimpleNamespace(schedule=SimpleNamespace(warmup_steps=16))
    config = SimpleNamespace(tokens=4096, trainer=SimpleNamespace(max_steps=-1), model=SimpleNamespace(optim=optim))
    set_max_steps(config, 17)
    assert config.trainer.max_steps == 17 and capsys.readouterr().err == ""
    set_max_steps(config, 16)
    warning = "warning: the learning rate never reaches its peak: 16 warmup steps, 16 in all"
    assert warning in capsys.readouterr().err
