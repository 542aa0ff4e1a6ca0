"""Weights by a rule: against independent calculations, in a plan, and over a resume with another length."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq

from lm.data.changes import StageChange, stages_of
from lm.data.epochs import repeat_warnings
from lm.data.mix import (
    Mixes,
    MixRule,
    Settled,
    format_rules,
    rule_of,
    settled_weights,
    temperature_weights,
    unimax_weights,
)
from lm.data.plan import Stage
from lm.data.ramp import BatchRamp
from lm.data.shards import load_manifest
from lm.data.slices import train_tokens
from lm.data.synthetic import random_documents, write_folder
from lm.errors import ConfigError
from tests.lm.datamodule_helpers import VOCAB, G, SaveAt, T, attach, fit, make, write_data

TOKENS = {"prose": 30_000, "code": 20_000, "reference": 10_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mix")
    write_data(path)
    return path


def corpora() -> list[dict[str, int]]:
    rng = np.random.default_rng(0)
    return [
        {f"s{i}": int(n) for i, n in enumerate(rng.lognormal(12, 2.5, rng.integers(1, 9)) + 100)} for _ in range(40)
    ]


# -- the rules themselves


def test_temperature_is_its_formula_between_proportional_and_uniform() -> None:
    # mT5's alpha = .3 for 1, 10 and 1,000 units: n^.3 is 1, 1.99526 and 7.94328, in all 10.93854.
    found = temperature_weights({"a": 1e6, "b": 1e7, "c": 1e9}, 1 / 0.3)
    assert list(found.values()) == pytest.approx([0.0914199, 0.182407, 0.726174], rel=1e-5)
    for tokens in corpora():
        n = np.array(list(tokens.values()), dtype=float)
        for temperature in (0.5, 1.0, 3.33, 100.0):
            ratio = np.array(list(temperature_weights(tokens, temperature).values()))
            expected = (n / n.max()) ** (1 / temperature)
            np.testing.assert_allclose(ratio, expected / expected.sum(), rtol=1e-10)
        np.testing.assert_allclose(list(temperature_weights(tokens, 1).values()), n / n.sum(), rtol=1e-10)
        np.testing.assert_allclose(list(temperature_weights(tokens, math.inf).values()), 1 / len(n), rtol=1e-12)
        np.testing.assert_allclose(list(temperature_weights(tokens, 1e9).values()), 1 / len(n), rtol=1e-6)


def test_unimax_is_the_level_that_fills_the_budget() -> None:
    """Independent: max-min fairness. All sources get min(cap, level), and one level fills the budget."""
    rng = np.random.default_rng(1)
    for tokens in corpora():
        n = np.array(list(tokens.values()), dtype=float)
        for max_epochs in (0.5, 1.0, 4.0):
            caps = max_epochs * n
            budget = caps.sum() * rng.uniform(0.01, 1)
            level = brentq(lambda x, caps=caps, budget=budget: np.minimum(caps, x).sum() - budget, 0, caps.max() + 1)
            weights = np.array(list(unimax_weights(tokens, budget, max_epochs).values()))
            np.testing.assert_allclose(weights * budget, np.minimum(caps, level), rtol=1e-6)
            assert np.all(weights * budget / n <= max_epochs * (1 + 1e-9))  # never above
            assert weights.sum() == pytest.approx(1)  # the budget is filled
    short = unimax_weights(TOKENS, 9_000, 4)
    assert list(short.values()) == pytest.approx([1 / 3] * 3)  # nobody at the cap: uniform
    with pytest.raises(ConfigError, match="has 240,000 tokens to give, 250,000 are to be drawn"):
        unimax_weights(TOKENS, 250_000, 4)


def test_what_earlier_stages_drew_counts_towards_max_epochs() -> None:
    drawn = unimax_weights(TOKENS, 30_000, 1, {"prose": 10_000, "reference": 12_000})
    assert drawn == pytest.approx({"prose": 0.5, "code": 0.5, "reference": 0.0})


# -- as a config gives them


def test_what_a_config_means() -> None:
    assert rule_of({"prose": 1, "code": 2}) is None
    assert rule_of({"temperature": 2}) == MixRule("temperature", 2.0)
    assert rule_of({"unimax": {"max_epochs": 4}, "sources": ["code"]}) == MixRule("unimax", 4.0, ("code",))
    assert rule_of({"temperature": 2.0}, prepared=["temperature", "b"]) is None  # a source of that name
    assert settled_weights({"temperature": 1}, TOKENS, None) == pytest.approx({k: n / 60e3 for k, n in TOKENS.items()})
    assert settled_weights({"prose": "2", "code": 1}, TOKENS, None) == {"prose": 2.0, "code": 1.0}
    assert settled_weights({"temperature": 1, "sources": ["code", "reference"]}, TOKENS, None) == pytest.approx(
        {"code": 2 / 3, "reference": 1 / 3}
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"temperature": 0}, "temperature must be a positive number"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": 1, "unimax": 4}, "stands alone or with sources; remove unimax"),
        ({"temperature": 1, "prose": 2}, "stands alone or with sources; remove prose"),
        ({"unimax": {"epochs": 4}}, "unimax takes max_epochs, got epochs"),
        ({"unimax": {"max_epochs": math.inf}}, "unimax must be a positive number"),
        ({"unimax": 4}, "needs the length of the run: set tokens"),
        ({"temperature": 1, "sources": "prose"}, "sources must be a list of different names"),
        ({"temperature": 1, "sources": ["poems"]}, "unknown source 'poems' in sources; prepared sources: prose, code"),
        ({"prose": [1]}, "weights: prose must be a number"),
        ({"prose": True}, "weights: prose must be a number"),
    ],
)
def test_bad_weights_are_one_line(weights: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settled_weights(weights, TOKENS, None)


# -- in a plan


def test_each_stage_has_the_tokens_up_to_the_next_mix(folder: Path) -> None:
    """A change of length in between does not end a mix; slices count for their source."""
    ramp = BatchRamp([(0, 100)])
    first = Stage(0, 10, {"prose": 1.0, "code[>=20]": 1.0})
    changes = {
        "length": [StageChange(40_000, sequence_length=20)],
        "mix": [StageChange(20_000, weights={"unimax": {"max_epochs": 1}})],
    }
    mixes = Mixes(load_manifest(folder), ramp, 60_000)
    stages = stages_of(first, ramp, changes, mixes.settle)
    assert [stage.from_tokens for stage in stages] == [0, 20_000, 40_000]
    # 10,000 tokens of prose and of code are read by then: 20,000, 10,000 and 10,000 are left for 40,000.
    assert stages[1].weights == stages[2].weights == pytest.approx({"prose": 0.5, "code": 0.25, "reference": 0.25})
    assert [(one.step, one.rule.kind) for one in mixes.settled] == [(200, "unimax")]
    assert Settled.from_plain(mixes.settled[0].plain()) == mixes.settled[0]
    assert "weights from step 200 on, by unimax, max_epochs 1: prose 0.5" in format_rules(mixes.settled)


def test_what_a_source_drew_counts_for_its_parts(folder: Path) -> None:
    manifest = load_manifest(folder)
    tokens = train_tokens(manifest, ["prose[>=40]", "prose[20:60]", "prose[40:60]"])
    drawn = {"prose": 6_000, "prose[20:60]": 3_000, "code": 1_000}  # before 10,000
    rule = {"unimax": {"max_epochs": 1}, "sources": ["prose[>=40]", "code"]}
    settle = Mixes(manifest, BatchRamp([(0, 100)]), 35_000).settle
    weights = settle(rule, 100, None, [Stage(0, 10, drawn)])
    read = 6_000 * tokens["prose[>=40]"] / 30_000 + 3_000 * tokens["prose[40:60]"] / tokens["prose[20:60]"]
    left = tokens["prose[>=40]"] - read
    assert 0 < left < 12_500 and weights["prose[>=40]"] == pytest.approx(left / 25_000)


def test_no_source_of_a_run_is_read_more_often_than_unimax_lets_it(folder: Path) -> None:
    steps = 90_000 // G
    data = attach(make(folder, weights={"unimax": {"max_epochs": 2}}), max_steps=steps)
    rows = {row.source: row for row in data.epoch_table()}
    assert rows["reference"].epochs == pytest.approx(2, rel=0.01) and rows["prose"].epochs < 2
    assert rows["prose"].tokens_drawn == pytest.approx(rows["code"].tokens_drawn, rel=0.01)
    assert sum(row.tokens_drawn for row in rows.values()) == pytest.approx(steps * G)
    assert data.source_weights["reference"] == pytest.approx(20_000 / (steps * G))
    assert repeat_warnings(list(rows.values())) == []
    hot = attach(make(folder, weights={"temperature": math.inf}), max_steps=150_000 // G)
    (line,) = repeat_warnings(hot.epoch_table())  # the warning covers weights by rule: 50,000 of 10,000 tokens
    assert line.startswith("source 'reference' is repeated 5.0 times")
    with pytest.raises(ConfigError, match="needs the length of the run"):
        attach(make(folder, weights={"unimax": {"max_epochs": 2}}))


def test_weights_of_numbers_are_the_same_plan_as_ever(folder: Path) -> None:
    given = attach(make(folder, weights={"prose": 3, "code": 1}, stages=[Stage(5 * G, T, {"code": 2.0})]))
    assert [dict(stage.weights) for stage in given.plan.stages] == [{"prose": 0.75, "code": 0.25}, {"code": 2.0}]
    assert given.mixes == [] and given.state_dict()["mixes"] == []
    ruled = attach(make(folder, weights={"temperature": 1}))
    assert dict(ruled.plan.stages[0].weights) == pytest.approx(dict(attach(make(folder)).plan.stages[0].weights))


def test_a_resume_of_another_length_keeps_the_weights(tmp_path: Path) -> None:
    """The run's end has moved, and with it what unimax would give; what was begun goes on, what was not is new."""
    small, path = tmp_path / "small", tmp_path / "run.ckpt"
    rows = {name: random_documents(n, VOCAB, 25, n) for name, n in (("a", 1500), ("b", 1000), ("c", 500))}
    write_folder(small, {name: {"train": row, "validation": row} for name, row in rows.items()}, VOCAB)
    whole = {"weights": {"unimax": {"max_epochs": 4}}}
    _, first, _ = fit(small, 60, callbacks=[SaveAt(str(path), 4)], **whole)
    assert first.mixes[0].weights == pytest.approx({"a": 2840 / 7680, "b": 2840 / 7680, "c": 2000 / 7680})
    _, resumed, _ = fit(small, 80, ckpt_path=str(path), **whole)
    assert resumed.plan == first.plan and resumed.mixes == first.mixes
    assert resumed.source_weights == first.source_weights
    fresh = attach(make(small, **whole), max_steps=80)
    assert fresh.mixes[0].weights == pytest.approx({"a": 4240 / 10240, "b": 4000 / 10240, "c": 2000 / 10240})
    with pytest.raises(ConfigError, match="stage 0's weights is"):
        fit(small, 80, ckpt_path=str(path), weights={"unimax": {"max_epochs": 5}})

    late = {"unimax": {"max_epochs": 4}, "sources": ["c", "b"]}
    staged = {"weights": {"temperature": 2}, "stages": [Stage(20 * G, T, late)]}
    _, first, _ = fit(small, 30, callbacks=[SaveAt(str(path), 4)], **staged)
    _, resumed, _ = fit(small, 50, ckpt_path=str(path), **staged)
    assert resumed.mixes[0] == first.mixes[0] and first.mixes[1].weights == {"c": 0.5, "b": 0.5}
    assert resumed.mixes[1].weights["c"] < 0.45  # not begun at the checkpoint: by the new length
