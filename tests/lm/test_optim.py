"""Schedules against the published figures, and the parameter table."""

import itertools

import pytest
import torch

from lm.config import ModelConfig, MuPConfig
from lm.model import Llama
from lm.optim.config import OptimConfig
from lm.optim.groups import parameter_groups, parameter_rows
from lm.optim.schedule import ScheduleConfig, lr_multiplier, wsd_decay_start


def test_cosine_of_the_7b_recipe() -> None:
    """40,000 steps, 2,000 warmup, 3e-4 -> 3e-5."""
    schedule = ScheduleConfig(kind="cosine", warmup_steps=2000, floor=0.1)

    def lr(step: int) -> float:
        return 3e-4 * lr_multiplier(step, 40_000, schedule)

    assert lr(0) == pytest.approx(3e-4 / 2000)
    assert lr(1999) == pytest.approx(3e-4)
    assert lr(2000) == pytest.approx(3e-4)
    assert lr(21_000) == pytest.approx(3e-5 + 0.5 * 2.7e-4)
    assert lr(40_000) == pytest.approx(3e-5)
    assert all(lr(s) >= lr(s + 1) for s in range(2000, 39_999, 97))


def test_wsd_is_flat_then_a_line() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_steps=10, decay_fraction=0.2, floor=0.0)
    values = [lr_multiplier(step, 100, schedule) for step in range(101)]
    assert values[9:81] == [1.0] * 72
    assert values[90] == pytest.approx(0.5)
    assert values[100] == 0.0
    assert wsd_decay_start(100, schedule) == 80


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [("linear", 0.8, 0.6), ("1-sqrt", 0.6, 1 - 0.8 * 0.5**0.5), ("cosine", 0.2 + 0.4 * (1 + 0.5**0.5), 0.6)],
)
def test_decay_shapes(shape: str, quarter: float, half: float) -> None:
    """From 1 at the decay's start to the floor .2 at its end, and never up."""
    schedule = ScheduleConfig(kind="wsd", decay_fraction=0.4, floor=0.2, decay_shape=shape)
    values = [lr_multiplier(step, 100, schedule) for step in range(101)]
    assert values[60] == 1.0 and values[100] == pytest.approx(0.2)
    assert values[70] == pytest.approx(quarter) and values[80] == pytest.approx(half)
    assert all(a >= b for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("shape", ["linear", "1-sqrt", "cosine"])
def test_a_cooldown_goes_from_the_given_rate_to_the_floor(shape: str) -> None:
    schedule = ScheduleConfig(
        kind="cooldown", floor=0.05, decay_shape=shape, warmup_steps=90, cooldown_from_step=40, cooldown_from=0.7
    )
    values = [lr_multiplier(step, 60, schedule) for step in range(40, 60)]
    assert values[0] == 0.7 and values[-1] == pytest.approx(0.05)
    assert all(a > b for a, b in itertools.pairwise(values))
    with pytest.raises(ValueError, match="--ckpt_path"):
        lr_multiplier(0, 60, ScheduleConfig(kind="cooldown"))


@pytest.mark.parametrize(
    "bad", [{"kind": "step"}, {"decay_shape": "square"}, {"warmup_steps": -1}, {"decay_fraction": 0}, {"floor": 1.5}]
)
def test_bad_schedules_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="schedule"):
        ScheduleConfig(**bad)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_one_row(tied: bool) -> None:
    config = ModelConfig(
        vocab_size=64, d_model=128, n_layers=2, n_heads=4, tie_embeddings=tied, mup=MuPConfig(base_width=64)
    )
    model = Llama(config)
    optim = OptimConfig(lr=8e-3, weight_decay=0.1)
    rows = {row.name: row for row in parameter_rows(dict(model.named_parameters()), config, optim)}
    assert rows["embedding.weight"].kind == "embedding"
    assert rows["embedding.weight"].weight_decay == 0 and rows["embedding.weight"].lr_multiplier == 1
    assert rows["blocks.0.attention_norm.weight"].kind == rows["norm.weight"].kind == "norm"
    assert rows["blocks.1.mlp.w_up.weight"].lr_multiplier == 0.5
    assert rows["blocks.1.mlp.w_up.weight"].weight_decay == 0.1
    assert ("head.weight" in rows) is not tied
    groups = parameter_groups(model, config, optim)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(8e-3, 0.0), (4e-3, 0.1)}


def test_groups_do_not_depend_on_the_number_of_dimensions() -> None:
    """ZeRO-3 flattens parameters: the table must not look at their shape."""
    config = ModelConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2)
    model = Llama(config)
    whole = [len(group["params"]) for group in parameter_groups(model, config, OptimConfig())]
    for parameter in model.parameters():
        parameter.data = parameter.data.flatten()
    assert [len(group["params"]) for group in parameter_groups(model, config, OptimConfig())] == whole
    assert torch.is_tensor(next(model.parameters()))
