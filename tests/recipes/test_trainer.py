"""'auto' is settled before a Trainer is built, and what the user gave stays."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.runtime import Machine
from plugins.callbacks.checkpoint import PeriodicCheckpoint
from plugins.callbacks.progress import StepProgress
from plugins.callbacks.young_checkpoint import YoungCheckpoint
from recipes import pretrain, trainer
from recipes.build import build
from recipes.trainer import RecipeTrainer, check_precision, settle
from sweeps.config import SweepConfig

WIDE = ModelConfig(vocab_size=97, d_model=512, n_layers=2, n_heads=8)


def test_settle_picks_only_what_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "machine_of", lambda device: Machine(device, True, True))
    assert settle("32-true", False, WIDE, 1e18, "cpu") == ("32-true", False, "")
    assert settle("32-true", "auto", WIDE, 1e18, "cpu")[:2] == ("32-true", True)
    assert settle("auto", False, WIDE, 1e18, "cpu")[:2] == ("bf16-mixed", False)
    precision, compiled, line = settle("auto", "auto", WIDE, 1e18, "cpu")
    assert (precision, compiled) == ("bf16-mixed", True)
    assert line.startswith("picked bf16-mixed, compiled blocks: the CPU has bf16")


@pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter")
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_auto_does_not_compile_what_is_cut(monkeypatch: pytest.MonkeyPatch, tensor_parallel: int) -> None:
    """Compiled blocks have wrong gradients under tensor parallelism, which is refused where it is asked for."""
    monkeypatch.setattr(trainer, "machine_of", lambda device: Machine(device, True, True))
    strategy = {"class_path": "plugins.strategies.fsdp.FSDP", "init_args": {"tensor_parallel": tensor_parallel}}
    built = build(
        {
            "tokens": 1e12,
            "model": {"config": {"vocab_size": 97, "d_model": 512, "n_layers": 2, "n_heads": 8}},
            "data": {"dir": "nowhere", "sequence_length": 32, "global_batch_tokens": 256},
            "trainer": {"accelerator": "cpu", "devices": 2, "strategy": strategy, "logger": False},
        }
    )
    assert built.module.runtime.compile is (tensor_parallel == 1)


def test_the_trainer_takes_what_was_settled() -> None:
    built = RecipeTrainer(accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False)
    assert built.precision == "bf16-mixed"


def test_one_callback_saves_and_one_shows_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint callback that a config adds takes the place of the default: two would prune each other's."""
    young, bar = YoungCheckpoint(permanent_every_tokens=1e3), StepProgress(every_seconds=3.0)
    built = RecipeTrainer(accelerator="cpu", logger=False, callbacks=[PeriodicCheckpoint(), bar, young])
    callbacks: list[object] = built.callbacks  # type: ignore[attr-defined]
    assert [one for one in callbacks if isinstance(one, (PeriodicCheckpoint, YoungCheckpoint))] == [young]
    assert built.progress_bar_callback is bar
    assert capsys.readouterr().err == (
        "note: of 2 callbacks that save checkpoints the last one counts: YoungCheckpoint\n"
    )

    plain = RecipeTrainer(accelerator="cpu", logger=False, callbacks=[PeriodicCheckpoint()])
    assert isinstance(plain.progress_bar_callback, StepProgress)
    assert capsys.readouterr().err.count("note:") == 0


def test_a_run_that_is_complete_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Its loop is skipped, so no step ever tells; one that trained has told already."""
    bar, state = StepProgress(), SimpleNamespace(global_step=8, max_steps=8, is_global_zero=True, default_root_dir="r")
    bar.teardown(state, None, "validate")  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
    bar.teardown(state, None, "fit")  # type: ignore[arg-type]
    assert capsys.readouterr().err == "step 8/8: complete, nothing to do\nrun r\n"
    bar.on_train_start(state, None)  # type: ignore[arg-type]
    bar.teardown(state, None, "fit")  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""


def test_unknown_precision_is_one_line() -> None:
    for known in ("auto", "32-true", "bf16-mixed", "fp8", None):
        check_precision(known)
    with pytest.raises(ConfigError, match="16-mixed is not supported; use auto, 32-true, bf16-mixed or fp8"):
        check_precision("16-mixed")


def test_a_sweep_may_not_pick_by_size() -> None:
    with pytest.raises(ConfigError, match="precision auto would differ between the cells"):
        SweepConfig(name="s", budgets={1e12: (32, 64)}, precision="auto")


def test_a_warning_and_a_lost_rank_are_one_line() -> None:
    """No place in the source, no code line under it; gloo's path and advice are left out."""
    before = warnings.formatwarning, warnings.filters[:]
    try:
        pretrain.quiet()
        assert warnings.formatwarning("rank 1\nis slow", UserWarning, "a.py", 1) == "warning: rank 1 is slow\n"
        assert "a.py:1" in warnings.formatwarning("odd", RuntimeWarning, "a.py", 1)
    finally:
        warnings.formatwarning, warnings.filters[:] = before  # type: ignore[index]
    lost = RuntimeError("[/x/gloo/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is often")
    assert pretrain._first_sentence(lost) == "Read error [127.0.0.1]:1: Connection reset by peer"
