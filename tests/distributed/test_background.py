"""Checkpoints written beside training: the same bytes, no wait, and the older ones stay when a write fails or dies."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback

from plugins.callbacks.checkpoint import PeriodicCheckpoint
from plugins.strategies import checkpoint
from plugins.strategies.background import BackgroundSaver, InBackground
from tests.distributed import harness, jobs
from tests.distributed.scenario import SINGLE, TENSOR_LAYOUTS, Layout, Model, build_trainer, fit

LAYOUTS = [
    SINGLE,
    Layout("fsdp", 2),
    Layout("zero2", 2),
    pytest.param(TENSOR_LAYOUTS[1], marks=pytest.mark.slow),
]


class Gate:
    """Holds every write of tensors of this process while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        write_data = dcp.FileSystemWriter.write_data

        def held(writer: Any, *args: Any, **kwargs: Any) -> Any:
            self.open.wait(60)
            return write_data(writer, *args, **kwargs)

        dcp.FileSystemWriter.write_data = held  # type: ignore[method-assign]


class SaveTwice(Callback):
    """Step 2: saves, then saves again in the background with the gate closed. Step 4: opens it and saves once more."""

    def __init__(self, folder: Path, gate: Gate):
        self.folder, self.gate = folder, gate
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if trainer.global_step == 2:
            self.gate.open.set()
            trainer.save_checkpoint(self.folder / "now")
            self.gate.open.clear()
            trainer.save_checkpoint(self.folder / "later", storage_options=InBackground())
        if trainer.global_step == 4:
            trainer.strategy.barrier()
            self.seen["complete at step 4"] = (self.folder / "later").exists()
            self.seen["hidden"] = sorted(path.name[:7] for path in self.folder.glob(".later.*"))
            trainer.strategy.barrier()
            threading.Timer(0.2, self.gate.open.set).start()
            trainer.save_checkpoint(self.folder / "last", storage_options=InBackground())
            self.seen["the next save waited"] = (self.folder / "later").exists()


def save_in_background(layout: Layout, folder: Path) -> dict[str, Any]:
    callback = SaveTwice(folder, Gate())
    trainer = build_trainer(layout, 6, callbacks=[callback])
    whole = fit(trainer, Model())
    complete = sorted(path.name for path in folder.iterdir())
    trainer.strategy.barrier()
    resumed = {name: fit(build_trainer(layout, 6), Model(), folder / name).losses for name in ("now", "later", "last")}
    return {**callback.seen, "complete": complete, "losses": whole.losses, "resumed": resumed}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_training_goes_on_and_the_bytes_are_the_same(layout: Layout, tmp_path) -> None:
    for result in harness.run(save_in_background, layout.world_size, layout, tmp_path):
        assert result["complete at step 4"] is False
        assert result["hidden"] == [".later."]
        assert result["the next save waited"] is True
        assert result["complete"] == ["last", "later", "now"]
        assert result["resumed"]["later"] == result["resumed"]["now"]
        assert result["resumed"]["later"] == pytest.approx(result["losses"][2:], rel=1e-5)
        assert result["resumed"]["last"] == pytest.approx(result["losses"][4:], rel=1e-5)
    now, later = (checkpoint.read_manifest(tmp_path / name)["files"] for name in ("now", "later"))
    assert now.keys() == later.keys()
    for name in now.keys() - {".metadata"}:  # it names its own folder
        assert now[name] == later[name], name


def fill_the_disk(layout: Layout, folder: Path) -> dict[str, Any]:
    """From step 4 on, the last rank's files may have 1,000 bytes; the end of the run can write again."""

    class Full(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_rank == trainer.world_size - 1 and trainer.global_step in (3, 5):
                trainer.strategy.saver.wait()
                limit = 1000 if trainer.global_step == 3 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            if trainer.global_step == 5 and batch_idx % 2 == 0:
                trainer.strategy.saver.wait()
                trainer.strategy.barrier()
                present.extend(sorted(os.listdir(folder / "checkpoints")))

    present: list[str] = []
    callbacks = [Full(), PeriodicCheckpoint(2, keep=1, asynchronous=True)]
    trainer = build_trainer(layout, 6, callbacks=callbacks, default_root_dir=folder, enable_checkpointing=True)
    module = fit(trainer, Model())
    return {"failures": trainer.strategy.saver.failures, "present": present, "steps": len(module.losses)}


@pytest.mark.parametrize("layout", [SINGLE, Layout("fsdp", 2)], ids=lambda layout: layout.name)
def test_a_full_disk_is_reported_and_the_run_goes_on(layout: Layout, tmp_path) -> None:
    for result in harness.run(fill_the_disk, layout.world_size, layout, tmp_path):
        assert result == {"failures": 1, "present": ["step-00000002"], "steps": 6}
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000006"]
    assert checkpoint.read_manifest(tmp_path / "checkpoints" / "step-00000006")["step"] == 6


def die_while_writing(layout: Layout, folder: Path) -> None:
    class Die(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 3:
                trainer.strategy.saver.wait()
                gate.open.clear()
            if trainer.global_step == 5:
                trainer.strategy.barrier()
                os.kill(os.getpid(), signal.SIGKILL)

    gate = Gate()
    gate.open.set()
    callbacks = [PeriodicCheckpoint(2, asynchronous=True), Die()]
    fit(build_trainer(layout, 6, callbacks=callbacks, default_root_dir=folder, enable_checkpointing=True), Model())


@pytest.mark.parametrize("layout", [SINGLE, Layout("ddp", 2)], ids=lambda layout: layout.name)
def test_a_kill_during_the_write_leaves_the_checkpoint_before_it(layout: Layout, tmp_path) -> None:
    with pytest.raises(RuntimeError, match="the process died without a word"):
        harness.run(die_while_writing, layout.world_size, layout, tmp_path)
    with pytest.warns(UserWarning, match="a save that did not finish"):
        newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None and newest.name == "step-00000002"
    resumed = harness.run(jobs.resume, layout.world_size, layout, newest)[0]
    assert len(resumed["losses"]) == jobs.STEPS - 2


def test_the_writing_thread_works_on_the_rank_s_device(monkeypatch, tmp_path) -> None:
    """Another thread's current CUDA device is 0 at first: each rank would open a context there."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.append((index, threading.current_thread().name)))
    saver = BackgroundSaver()
    saver.start({"param/a": torch.ones(2)}, {}, tmp_path / "saved", 1, InBackground())
    saver.wait()
    assert saver.failures == 0 and (tmp_path / "saved").is_dir()
    assert seen == [(3, "checkpoint")]
