"""The guard in real runs of one process: what it saves, what a roll-back leaves, and what a restart remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback

from lm.data.order import Stage
from lm.errors import ConfigError, RunStopped
from plugins.callbacks import roll_backs
from plugins.callbacks.resume import Resume
from plugins.callbacks.roll_backs import FILE
from plugins.callbacks.spike_guard import SpikeGuard
from plugins.strategies import checkpoint
from plugins.strategies.checkpoint import latest
from plugins.strategies.checkpoint_io import STATE, read_rest
from tests.plugins.guard_runs import LENGTH, SAMPLES, Curve, Inject, build, make_folder, random_tokens, run, samples

STEPS = 60
POISON = samples(34, 4)  # what the steps from 34 on read, while nothing is dropped
MARGIN = 2
DROPPED = [(32 * SAMPLES, 39 * SAMPLES)]  # steps 34 to 36 strike, with a margin of 2


def guard(**options: Any) -> SpikeGuard:
    return SpikeGuard(**{"warmup": 16, "strikes": 3, "strike_window": 20, "margin_steps": MARGIN, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("guard") / "data")


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same(one: Any, other: Any) -> bool:
    one, other = weights(one), weights(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def validation_loss(trainer: Any, module: Any, data: Any) -> float:
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    return module.metrics["val_loss"]


class DropFirst(Callback):
    """Drops samples before the run begins."""

    def __init__(self, ranges: Any):
        self.ranges = ranges

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        trainer.datamodule.set_skipped(self.ranges)


@pytest.fixture(scope="module")
def rolled_back(folder, tmp_path_factory) -> Any:
    """A run over poisoned samples, with its guard, curve and folder."""
    run_dir, watch, curve = tmp_path_factory.mktemp("rolled"), guard(), Curve()
    return *run(folder, run_dir, STEPS, watch, curve, poison=POISON), watch, curve, run_dir


# -- one step ---------------------------------------------------------------------------------------------------


def test_each_kind_of_spike_is_skipped_and_a_slow_run_is_left_alone(folder, tmp_path, capsys) -> None:
    states: dict[int, Any] = {}

    class States(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                adam = [dict(state) for state in trainer.optimizers[0].state.values()]
                moments = [{key: value.clone() for key, value in state.items()} for state in adam]
                states[trainer.global_step] = (list(weights(module).values()), moments)

    def scaled(trainer, module, batch):
        batch["loss_tokens"] = batch["loss_tokens"] / 1e4

    def not_a_number(trainer, module, batch):
        batch["loss_tokens"] = float("nan")

    inject = [Inject(24, random_tokens), Inject(27, scaled), Inject(30, not_a_number), Inject(2, not_a_number)]
    watch = guard(max_roll_backs=0)
    trainer, _, _ = run(folder, tmp_path, 34, watch, *inject, States(), data={"micro_batch_size": SAMPLES // 2})
    assert trainer.accumulate_grad_batches == 2 and trainer.global_step == 34
    assert watch.skipped_steps == trainer.strategy.skipped_steps == 4
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("spike guard:")]
    assert [line.split(":")[1] for line in lines] == [f" step {step} skipped" for step in (3, 25, 28, 31)]
    assert "is nan" in lines[0] and "above the limit" in lines[1] and "above the limit" in lines[2]
    for step in range(4, 35):
        for before, after in zip(states[step - 1][0], states[step][0], strict=True):
            assert torch.equal(before, after) == (step in (25, 28, 31)), step
        for before, after in zip(states[step - 1][1], states[step][1], strict=True):
            assert all(torch.equal(before[key], after[key]) == (step in (25, 28, 31)) for key in before), step
    assert {float(moments["step"]) for moments in states[34][1]} == {30.0}


def test_a_guard_that_sees_no_spike_changes_nothing(folder, tmp_path) -> None:
    watch = guard()
    _, guarded, _ = run(folder, tmp_path / "a", 30, watch)
    _, free, _ = run(folder, tmp_path / "b", 30, None)
    assert watch.skipped_steps == 0 and watch.rule.accepted == 30 and same(guarded, free)


def test_what_is_not_finite_for_long_stops_the_run_without_a_guard_too(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("plugins.strategies.portable.MAX_SKIPPED_IN_A_ROW", 5)

    class Broken(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step >= 3:
                batch["loss_tokens"] = float("nan")

    with pytest.raises(RunStopped, match=r"^5 optimizer steps in a row were skipped, up to step 8 .*lower optim.lr"):
        run(folder, tmp_path, 30, None, Broken())


# -- going back -------------------------------------------------------------------------------------------------


def test_a_roll_back_gets_past_a_poisoned_range_as_if_it_had_never_been(folder, tmp_path, rolled_back) -> None:
    """Bit for bit the run from whose order the samples were dropped from the start."""
    trainer, module, data, watch, curve, run_dir = rolled_back
    clean_curve = Curve()
    _, clean, _ = run(folder, tmp_path, STEPS, None, clean_curve, DropFirst(DROPPED))
    assert curve.visited == [*range(1, 38), *range(31, STEPS + 1)]
    assert data.skipped == DROPPED and trainer.global_step == STEPS
    assert curve.ids == clean_curve.ids
    assert same(module, clean)
    (back,) = watch.roll_backs
    assert (back.first_strike, back.last_strike, back.at_step, back.to_step) == (34, 36, 37, 30)
    recorded = json.loads((run_dir / FILE).read_text())
    assert recorded["skipped"] == [list(pair) for pair in DROPPED] and len(recorded["roll_backs"]) == 1
    assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {float(STEPS)}
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == STEPS


def test_a_guarded_run_ends_as_the_clean_one_and_an_unguarded_one_does_not(folder, tmp_path) -> None:
    losses, data = {}, {"global_batch_tokens": 4 * LENGTH * SAMPLES}
    poison = range(108 * 4 * SAMPLES, 116 * 4 * SAMPLES)
    for name, watch, bad in (("clean", None, range(0)), ("guarded", guard(), poison), ("free", None, poison)):
        losses[name] = validation_loss(*run(folder, tmp_path / name, 120, watch, poison=bad, data=data, save_every=40))
    assert losses["guarded"] == pytest.approx(losses["clean"], rel=0.01)
    assert losses["free"] > 1.03 * losses["clean"]


def test_asynchronous_saves_accumulation_a_ramp_and_stages(folder, tmp_path) -> None:
    """Strikes before and after a change of batch and of stage: back before both, and again as if it had never been."""
    data = {
        "micro_batch_size": 2,
        "batch_ramp": [[0, LENGTH * 4], [LENGTH * 4 * 32, LENGTH * SAMPLES]],
        "stages": [Stage(LENGTH * 4 * 34, LENGTH // 2, {"prose": 1.0})],
        "num_workers": 1,
    }
    # The steps before 32 read 4 samples, step 32 reads 8, those from 33 on, in the second stage, 16 half as long.
    start = 32 * 4 + 8 + 4 * 16
    options: dict[str, Any] = {"data": data, "val_check_interval": 10, "limit_val_batches": 1, "asynchronous": True}
    watch, curve, again = guard(warmup=4, margin_steps=3), Curve(), Curve()
    inject = [Inject(step, random_tokens) for step in (30, 31)]
    trainer, module, source = run(
        folder, tmp_path / "a", 50, watch, curve, *inject, poison=range(start, start + 32), **options
    )
    assert curve.visited == [*range(1, 39), *range(31, 51)]
    assert [(back.first_strike, back.last_strike, back.to_step) for back in watch.roll_backs] == [(30, 37, 30)]
    # Steps 30 to 32; and 33 to 40, whose numbers moved up by the 16 samples that the first stage took instead.
    assert source.skipped == [(30 * 4, 136), (136 + 16, 136 + 16 + 8 * 16)]
    progress = trainer.fit_loop.epoch_loop.batch_progress
    assert trainer.accumulate_grad_batches == 4 and progress.total.completed == progress.current.ready == 50 * 4
    _, clean, _ = run(folder, tmp_path / "b", 50, None, again, DropFirst(source.skipped), **options)
    assert curve.ids == again.ids and curve.losses == again.losses
    assert same(module, clean)


def test_without_an_older_checkpoint_it_says_so_and_skips_on(folder, tmp_path, capsys) -> None:
    watch, curve = guard(), Curve()
    _, _, data = run(folder, tmp_path, 45, watch, curve, poison=POISON, save_every=0)
    assert curve.visited == list(range(1, 46)) and data.skipped == []
    assert watch.skipped_steps == 4 and watch.roll_backs == []
    assert (
        "no sound checkpoint is older than the first strike, at step 35: steps are skipped only"
        in capsys.readouterr().err
    )


def test_in_the_end_it_stops_with_a_diagnosis_and_leaves_a_good_checkpoint(folder, tmp_path, capsys) -> None:
    """40 steps of poison and roll-backs that drop 7, then, with twice the margin, 11 steps."""

    class History(Callback):
        def __init__(self) -> None:
            self.history = {"log_z": [(step, 0.3 * step) for step in range(34)]}

    watch = guard(max_roll_backs=2)
    with pytest.raises(RunStopped) as stopped:
        run(folder, tmp_path, 80, watch, History(), poison=samples(34, 40))
    text = str(stopped.value)
    assert "after 2 roll-backs" in text and "model.z_loss" in text and "\n" not in text
    assert [(b.stop - b.start) // SAMPLES for b in (range(*pair) for pair in watch.roll_backs[0].dropped)] == [7]
    # It came no further than before: from one checkpoint earlier, and twice as much.
    assert [back.to_step for back in watch.roll_backs] == [30, 20]
    assert sum(stop - start for start, stop in watch.roll_backs[1].dropped) // SAMPLES > 7
    left = latest(tmp_path / "checkpoints")
    assert left is not None and left.name <= "step-00000034"
    assert f"checkpoint of step {int(left.name[-8:])} is left" in text
    with pytest.raises(RunStopped, match="spike guard: stopped"):  # a restart does not forget how often it went back
        run(folder, tmp_path, 80, guard(max_roll_backs=2), poison=samples(34, 40), ckpt_path=left)


# -- restarts ---------------------------------------------------------------------------------------------------


class Kill(Exception):
    pass


class KillAt(Callback):
    """Ends the run when so many steps, roll-backs counted, are done; saves first where a path is given."""

    def __init__(self, done: int, path: Path | None = None):
        self.left, self.path = done, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.left -= 1
        if self.left == 0:
            if self.path is not None:
                trainer.save_checkpoint(self.path)
            raise Kill


@pytest.mark.parametrize("done", [39, 36], ids=["after the roll-back", "between strikes"])
def test_a_restart_decides_as_the_run_that_was_never_stopped(folder, tmp_path, rolled_back, done: int) -> None:
    """39: two steps after the roll-back to 30, nothing saved since. 36: two strikes so far, in the checkpoint."""
    _, whole, _, _, _, _ = rolled_back
    path = tmp_path / "checkpoints" / "step-00000036" if done == 36 else None
    with pytest.raises(Kill):
        run(folder, tmp_path, STEPS, guard(), KillAt(done, path), poison=POISON)
    newest = latest(tmp_path / "checkpoints")
    assert newest.name == ("step-00000036" if done == 36 else "step-00000030")
    watch, curve = guard(), Curve()
    _, module, data = run(folder, tmp_path, STEPS, watch, curve, poison=POISON, ckpt_path=newest)
    assert curve.visited == [*([37] if done == 36 else []), *range(31, STEPS + 1)]
    assert same(module, whole) and data.skipped == DROPPED and len(watch.roll_backs) == 1


def test_a_checkpoint_of_an_abandoned_branch_is_gone_or_refused(folder, tmp_path, monkeypatch) -> None:
    """And a disk that is full for a moment costs neither the run nor the record of its roll-back."""
    write, failures = roll_backs._write, [OSError(28, "No space left on device")]

    def full_at_first(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        write(*arguments)

    monkeypatch.setattr(roll_backs, "_write", full_at_first)

    class SaveAfterStrike(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 36 and not (tmp_path / "kept").exists():
                trainer.save_checkpoint(tmp_path / "checkpoints" / "step-00000036")
                trainer.save_checkpoint(tmp_path / "kept")

    run(folder, tmp_path, 38, guard(), SaveAfterStrike(), poison=POISON, log_every_n_steps=1)
    assert not failures and json.loads((tmp_path / FILE).read_text())["skipped"] == [list(pair) for pair in DROPPED]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000020", "step-00000030", "step-00000038"]
    with pytest.raises(ConfigError, match="step 36 belongs to a branch that the spike guard gave up"):
        run(folder, tmp_path, 50, guard(), ckpt_path=tmp_path / "kept")

    # One who goes back by hand leaves the branch of the roll-back, and with it what the roll-back dropped.
    watch = guard()
    trainer, module, data = build(folder, tmp_path, 32, watch)
    trainer.callbacks.insert(0, Resume(trainer))  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=data, ckpt_path=tmp_path / "checkpoints" / "step-00000030")
    assert watch.roll_backs == [] and data.skipped == []
    assert json.loads((tmp_path / FILE).read_text()) == {"roll_backs": [], "skipped": []}


def test_a_checkpoint_that_cannot_be_removed_is_replaced(folder, tmp_path, monkeypatch) -> None:
    """Saved at step 36 and given up at 37: the new branch saves its own step 36 though the old one is still there."""
    monkeypatch.setattr(checkpoint, "remove", Mock(side_effect=OSError(5, "Input/output error")))
    run(folder, tmp_path, 38, guard(), poison=POISON, save_every=12)
    rest = read_rest(tmp_path / "checkpoints" / "step-00000036" / STATE)
    assert rest["PoisonedData"]["skipped"] == [list(pair) for pair in DROPPED]


def test_a_wrong_setting_is_one_line() -> None:
    for options in ({"strikes": 0}, {"strikes": 60}, {"max_roll_backs": -1}, {"rule": "none"}):
        with pytest.raises(ConfigError, match=r"^spike_guard: [^\n]+$"):
            SpikeGuard(**options)
