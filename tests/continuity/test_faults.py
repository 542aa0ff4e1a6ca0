"""Disks that fill up or cannot be written, damaged and hostile checkpoints, configs that name what they must not."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lm.data.files import DataError
from lm.data.shards import load_manifest
from plugins.strategies import checkpoint, leftovers
from plugins.strategies.checkpoint import CheckpointError
from plugins.strategies.metadata import PlainReader
from tests.continuity.launch import Job, Tracer, fit_arguments, histories

SAVING = "[{class_path: plugins.callbacks.checkpoint.PeriodicCheckpoint, init_args: {every_n_steps: 2, keep: 1, %s}}]"


class DiskInTheWay:
    """From step 5 to 14 a file is where the folder of checkpoints was: root as well cannot write there."""

    def __init__(self, checkpoints: Path, until: int = 14) -> None:
        self.checkpoints, self.until = checkpoints, until

    def __call__(self, tracer: Tracer) -> None:
        from lm.module import LlamaModule

        start = LlamaModule.on_train_batch_start
        hidden = self.checkpoints.with_name("hidden")

        def on_train_batch_start(module, *args):
            step = module.trainer.global_step + 1
            if module.trainer.is_global_zero and step == 5:
                self.checkpoints.rename(hidden)
                self.checkpoints.write_text("in the way")
            if module.trainer.is_global_zero and step == self.until:
                self.checkpoints.unlink()
                hidden.rename(self.checkpoints)
            start(module, *args)

        LlamaModule.on_train_batch_start = on_train_batch_start


def warnings_of(job: Job) -> list[str]:
    return [line for line in job.output().splitlines() if line.startswith("warning: ")]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_disk_that_cannot_be_written_does_not_stop_training(folder: Path, world_size: int) -> None:
    """Due at 6, 8, 10, 12, ...: failed at 6 and 8, passed over at 10, failed at 12, passed over thrice, saved at 20."""
    name = f"way-{world_size}"
    checkpoints = folder / "runs" / name / "checkpoints"
    arguments = fit_arguments(folder, name, "--trainer.callbacks", SAVING % "asynchronous: false")
    more = ["--trainer.strategy", "ddp"] if world_size == 2 else []
    job = Job(folder, [*arguments, *more], world_size, DiskInTheWay(checkpoints))
    assert job.join() == [0] * world_size, job.output()
    assert "Traceback" not in job.output()
    told = warnings_of(job)
    assert len(told) == 3 and all("the run goes on, older checkpoints stay" in line for line in told), told
    assert [step for what, step in job.events if what == "save"] == [2, 4, 6, 8, 12, 20, 22, 24]
    assert sorted(os.listdir(checkpoints)) == ["step-00000024"]


def test_the_last_save_is_tried_again_and_then_the_run_fails(folder: Path) -> None:
    checkpoints = folder / "runs" / "end" / "checkpoints"
    callbacks = SAVING % "final_retry_seconds: 2"
    job = Job(folder, fit_arguments(folder, "end", "--trainer.callbacks", callbacks), 1, DiskInTheWay(checkpoints, 99))
    assert job.join() == [2], job.output()
    errors = [line for line in job.output().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "the end of the run is kept nowhere" in errors[0], job.output()
    assert any("trying again" in line for line in warnings_of(job))


def test_a_full_disk(folder: Path, tmp_path: Path) -> None:
    """A real file system of 600 KB, where one checkpoint fits and two do not."""
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(mount)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no right to mount a tmpfs here")
    try:
        line = fit_arguments(folder, "full", "--trainer.callbacks", SAVING % "final_retry_seconds: 0")
        job = Job(folder, [*line, "--runs_dir", str(mount)])
        (code,) = job.join()
        assert code == 2, job.output()
        assert "No space left" in job.output() or "cut short" in job.output(), job.output()
        assert "error: cannot save" in job.output()
        steps = [step for what, step in job.events if what == "step"]
        assert steps == list(range(1, 25))  # trained to the end
        kept = [path.name for path in (mount / "full" / "checkpoints").iterdir()]
        assert len(kept) == 1, kept
        newest = mount / "full" / "checkpoints" / kept[0]
        checkpoint.verify(newest, checkpoint.read_manifest(newest)["files"], checkpoint.file_names(newest))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_damaged_checkpoint_is_told_set_aside_and_passed_over(folder: Path) -> None:
    """One flipped bit in the newest, found by two ranks together; what a kill left is deleted."""
    job = Job(folder, fit_arguments(folder, "damaged", "--trainer.strategy", "ddp"), 2)
    assert job.wait_for(lambda what, step: what == "step" and step == 8), job.output()
    job.kill()
    checkpoints = folder / "runs" / "damaged" / "checkpoints"
    newest, older = checkpoint.candidates(checkpoints)[:2]
    (checkpoints / ".step-00000009.0123abcd.tmp").mkdir()
    (checkpoints / ".mine.tmp").mkdir()
    shard = next(newest.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    job = Job(folder, fit_arguments(folder, "damaged", "--trainer.strategy", "ddp"), 2)
    assert job.join() == [0, 0], job.output()
    (line,) = warnings_of(job)
    assert f"{newest} is damaged: {shard.name} differs" in line and f"damaged-{newest.name}" in line
    assert f"checkpoint path at {older}" in job.output()
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == [".mine.tmp", f"damaged-{newest.name}", "step-00000021", "step-00000024"]
    assert sorted(histories(folder, "damaged")["loss"]) == list(range(1, 25))
    for path in checkpoint.candidates(checkpoints):
        (path / "state.pt").write_bytes(b"")
    job = Job(folder, fit_arguments(folder, "damaged"))
    assert job.join() == [2]
    assert "none of its 2 checkpoints is sound" in job.output()


def test_a_flipped_bit_in_a_shard_is_told_before_training(folder: Path, tmp_path: Path) -> None:
    """By whichever of two ranks reads it; only larger folders than data.verify_bytes are read unverified."""
    data = tmp_path / "data"
    shutil.copytree(folder / "data", data)
    shard = data / "code" / "train" / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 & ~1] ^= 1  # another id of the vocabulary
    shard.write_bytes(content)
    arguments = fit_arguments(folder, "flipped", "--data.dir", str(data), "--tokens", "256")
    job = Job(folder, [*arguments, "--trainer.strategy", "ddp"], 2)
    assert job.join() == [2, 2], job.output()
    assert job.output().count("error: ") == 1 and f"error: {shard} is not what was prepared" in job.output()
    assert not (folder / "runs" / "flipped").exists()
    job = Job(folder, [*arguments, "--data.verify_bytes", "1000"])
    assert job.join() == [0], job.output()
    assert f"python -m recipes.data verify --dir {data}" in job.output()


def test_leftovers_of_the_living_stay(tmp_path: Path) -> None:
    held, dead = (tmp_path / f".step-1.0123abc{digit}.tmp" for digit in "de")
    held.mkdir()
    dead.mkdir()
    leftovers.hold(held)
    assert leftovers.clean(tmp_path) == [dead]
    leftovers.release(held)
    assert leftovers.clean(tmp_path) == [held]


class Hostile:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def test_a_hostile_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    """Code in .metadata, with a manifest that fits; the same file runs it through torch's own reader."""
    job = Job(folder, fit_arguments(folder, "hostile", "--tokens", "1024"))
    assert job.join() == [0], job.output()
    path = tmp_path / "hostile"
    shutil.copytree(folder / "runs" / "hostile" / "checkpoints" / "step-00000004", path)
    PlainReader(path).read_metadata()
    proof = tmp_path / "ran"
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(proof)))
    names = checkpoint.file_names(path)
    manifest = {"format": 1, "step": 4, "files": checkpoint.describe(path, names)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    arguments = ["validate", "--config", str(folder / "experiment.yaml"), "--ckpt_path", str(path)]
    job = Job(folder, [*arguments, "--name", "hostile"])
    assert job.join() == [2], job.output()
    errors = [line for line in job.output().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "posix.system, which no checkpoint needs" in errors[0], job.output()
    assert not proof.exists()
    pickle.loads((path / ".metadata").read_bytes())  # what torch would have done
    deadline = time.monotonic() + 5
    while not proof.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert proof.exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "linked"])
def test_manifests_that_point_outside_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    (tmp_path / "outside").write_bytes(b"secret")
    (path / "linked").symlink_to(tmp_path / "outside")
    entry = {"bytes": 6, "sha256": "0" * 64}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 1, "files": {name: entry}}))
    with pytest.raises(CheckpointError, match=r"is refused: its manifest\.json names"):
        checkpoint.read_manifest(path)


def test_data_manifests_that_point_outside_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "data", tmp_path / "data")
    file = tmp_path / "data" / "manifest.json"
    content = json.loads(file.read_text())
    content["sources"]["prose"]["splits"]["train"]["shards"][0]["file"] = "../../../../secret.bin"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"secret\.bin, outside of its folder"):
        load_manifest(tmp_path / "data")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("callbacks", "[{class_path: subprocess.Popen, init_args: {args: [touch, PROOF]}}]", "subprocess.Popen"),
        ("callbacks", "[{class_path: os.system, init_args: {command: touch PROOF}}]", "os.system"),
        ("callbacks", "[{class_path: evil.Callback}]", "evil.Callback is refused"),
        ("callbacks", "[{class_path: lm.config.ModelConfig}]", "no subclass of Callback"),
        ("logger", "{class_path: subprocess.Popen, init_args: {args: [touch, PROOF]}}", "subprocess.Popen"),
        ("strategy", "{class_path: subprocess.Popen, init_args: {args: [touch, PROOF]}}", "subprocess.Popen"),
        ("strategy", "{class_path: lm.config.ModelConfig}", "lm.config.ModelConfig"),
    ],
)
def test_a_config_cannot_name_any_class(folder: Path, tmp_path: Path, monkeypatch, capfd, key, value, words) -> None:
    from recipes.pretrain import main

    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Callback: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = [
        "pretrain",
        *fit_arguments(folder, "refused"),
        f"--trainer.{key}",
        value.replace("PROOF", f"{tmp_path}/ran"),
    ]
    monkeypatch.setattr("sys.argv", line)
    assert main() == 2
    errors = [text for text in capfd.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and words in errors[0] and len(errors[0]) < 400, errors
    assert not (tmp_path / "ran").exists()
