"""Stages put together from several owners, the RoPE of a step, and a table that validation made first."""

from __future__ import annotations

import itertools

import pytest
import torch

from lm.config import ModelConfig
from lm.data.changes import LongDocuments, StageChange, stages_of
from lm.data.plan import Stage
from lm.data.ramp import BatchRamp
from lm.errors import ConfigError
from lm.rope import rope_table
from lm.rope_scaling import RopeScaling
from lm.rope_stages import RopeChange, check_reach, config_at

RAMP = BatchRamp([(0, 100)])
FIRST = Stage(0, 10, {"a": 1.0})


def test_what_a_change_leaves_out_goes_on() -> None:
    changes = {
        "length": [StageChange(300, sequence_length=20), StageChange(600, sequence_length=50)],
        "mix": [StageChange(450, weights={"b": 1.0})],
        "long": [StageChange(580, long_documents=LongDocuments(20, 0.5))],  # the same step as 600
    }
    wanted = (
        FIRST,
        Stage(300, 20, {"a": 1.0}),
        Stage(450, 20, {"b": 1.0}),
        Stage(600, 50, {"b[>=20]": 0.5, "b[<20]": 0.5}),
    )
    for order in itertools.permutations(changes):
        assert stages_of(FIRST, RAMP, {owner: changes[owner] for owner in order}) == wanted
    later = {**changes, "end": [StageChange(900, weights={"c": 2.0})]}
    assert stages_of(FIRST, RAMP, later)[-1] == Stage(900, 50, {"c[>=20]": 1.0, "c[<20]": 1.0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": [StageChange(0, 20)]}, "x: a later stage starts at 0 tokens"),
        ({"x": [StageChange(301, 20), StageChange(400, 50)]}, "at least one step apart, got .* .steps .4, 4"),
        ({"x": [StageChange(300, 20)], "y": [StageChange(201, 30)]}, "x and y both set sequence_length at step 3"),
    ],
)
def test_changes_that_do_not_fit_are_refused(changes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        stages_of(FIRST, RAMP, changes)


def test_rope_follows_the_step() -> None:
    config = ModelConfig(vocab_size=10, d_model=8, n_layers=1, n_heads=2)
    linear = RopeScaling("linear", 2.0)
    changes = [RopeChange(300, theta=5e5), RopeChange(601, scaling=linear)]
    ropes = [(c.rope_theta, c.rope_scaling) for c in (config_at(config, changes, RAMP, step) for step in range(9))]
    assert ropes == [(1e4, None)] * 3 + [(5e5, None)] * 4 + [(5e5, linear)] * 2


def test_reach_of_a_scaling() -> None:
    check_reach(64, RopeScaling("yarn", 4.0, 16), "here")
    check_reach(10**6, RopeScaling("dynamic", 4.0, 16), "here")
    with pytest.raises(ConfigError, match=r"here: .* 64 positions that rope_scaling llama3 .* at least 4\.0625"):
        check_reach(65, RopeScaling("llama3", 4.0, 16), "here")


def test_a_table_first_made_in_validation_serves_training() -> None:
    """rope_table keeps its results: one made under inference_mode could not be saved for a backward pass."""
    arguments = (37, 8, 12_345.0, torch.device("cpu"))
    with torch.inference_mode():
        cos, _ = rope_table(*arguments)
    x = torch.ones(37, 4, requires_grad=True)
    (x * rope_table(*arguments)[0]).sum().backward()
    assert torch.equal(x.grad, cos)
