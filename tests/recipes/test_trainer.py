"""'auto' is settled before a Trainer is built, and what the user gave stays."""

from __future__ import annotations

import pytest

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.runtime import Machine
from recipes import trainer
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


def test_the_trainer_takes_what_was_settled() -> None:
    built = RecipeTrainer(accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False)
    assert built.precision == "bf16-mixed"


def test_unknown_precision_is_one_line() -> None:
    for known in ("auto", "32-true", "bf16-mixed", "fp8", None):
        check_precision(known)
    with pytest.raises(ConfigError, match="16-mixed is not supported; use auto, 32-true, bf16-mixed or fp8"):
        check_precision("16-mixed")


def test_a_sweep_may_not_pick_by_size() -> None:
    with pytest.raises(ConfigError, match="precision auto would differ between the cells"):
        SweepConfig(name="s", budgets={1e12: (32, 64)}, precision="auto")
