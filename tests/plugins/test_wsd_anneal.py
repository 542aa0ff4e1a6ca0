"""The annealing mix: which source every sample of every stage came from, and several cooldowns from one trunk."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from lm.errors import ConfigError
from lm.optim.schedule import ScheduleConfig, wsd_decay_start
from plugins.callbacks.long_context import LongContext, LongStage
from plugins.callbacks.wsd_anneal import WSDAnneal
from tests.stage_runs import RANGES, WSD, G, SaveAfter, T, run, source_of, write_corpus

MIX = {"prose": 3.0, "code": 1.0}
ANNEAL = {"reference": 1.0, "code": 1.0}
COOLDOWN = ScheduleConfig("cooldown", decay_shape="1-sqrt", floor=0.0)
NAMES = tuple(RANGES)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("anneal") / "data"
    write_corpus(path)
    return path


def drawn(steps: dict) -> Counter:
    """Samples of each source, by their ids; also checks that each batch names the source its ids tell."""
    counts: Counter = Counter()
    for step in steps.values():
        for row, index in zip(step["input_ids"], step["source"], strict=True):
            assert NAMES[index] == source_of(row)
            counts[source_of(row)] += 1
    return counts


def within(steps: dict, first: int, stop: int) -> dict:
    return {step: seen for step, seen in steps.items() if first <= step < stop}


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_sample_comes_from_the_mix_of_its_stage(corpus: Path) -> None:
    """Three stages in a row: the trunk's mix, a longer sequence with the same mix, the annealing mix at that length."""
    start = wsd_decay_start(24, WSD)
    long = LongContext([LongStage(2 * T, from_tokens=12 * G)])
    orders = [run(corpus, 24, order, schedule=WSD, weights=MIX)[0] for order in
              ([WSDAnneal(ANNEAL), long], [long, WSDAnneal(ANNEAL)])]  # fmt: skip
    steps = orders[0]
    assert start == 18 and sorted(steps) == list(range(24))
    assert [len(seen["input_ids"][0]) for seen in steps.values()] == [T] * 12 + [2 * T] * 12
    assert all(seen == other for seen, other in zip(steps.values(), orders[1].values(), strict=True))
    for first, stop, mix in ((0, 12, {"prose", "code"}), (12, 18, {"prose", "code"}), (18, 24, {"reference", "code"})):
        assert set(drawn(within(steps, first, stop))) == mix
    # The step of the switch is the first one with a lower rate than the peak's.
    rates = [seen["lr"] for seen in steps.values()]
    assert rates[17] == max(rates) and rates[18] == max(rates) and rates[19] < rates[18]
    early = drawn(within(steps, 0, 18))
    assert early["prose"] == pytest.approx(0.75 * sum(early.values()), rel=0.15)


def test_two_cooldowns_from_one_trunk(corpus: Path, tmp_path: Path) -> None:
    """Budgets of 4 and 8 steps from a stable-phase checkpoint; the trunk is as before, and the second is resumed."""
    trunk = tmp_path / "trunk" / "checkpoints"
    whole, _ = run(corpus, 16, [WSDAnneal(ANNEAL), SaveAfter(trunk, 8)], schedule=WSD, weights=MIX)
    assert wsd_decay_start(16, WSD) == 12 and set(drawn(within(whole, 0, 12))) == {"prose", "code"}
    before = contents(trunk.parent)
    branches = {}
    for end in (12, 16):
        saves = SaveAfter(tmp_path / f"branch-{end}", 10)
        branches[end], trainer = run(
            corpus, end, [WSDAnneal(ANNEAL), saves], schedule=COOLDOWN, weights=MIX, ckpt_path=trunk / "step-00000008"
        )
        assert sorted(branches[end]) == list(range(8, end))
        assert set(drawn(branches[end])) == {"reference", "code"}  # from the checkpoint on, to the last step
        stages = trainer.datamodule.plan.stages
        assert [(stage.from_tokens, dict(stage.weights)) for stage in stages[1:]] == [(8 * G, ANNEAL)]
        rates = [seen["lr"] for seen in branches[end].values()]
        assert rates[0] == whole[7]["lr"] and rates[-1] == pytest.approx(0.0, abs=1e-12)
        table = {row.source: row.tokens_drawn for row in trainer.datamodule.epoch_table()}
        assert table["reference"] == (end - 8) * G / 2 and table["prose"] == 8 * G * 0.75
    # The shorter one and the longer one see the same data as far as both go, at other rates.
    for step in range(8, 12):
        assert branches[12][step]["input_ids"] == branches[16][step]["input_ids"]
    assert branches[12][11]["lr"] < branches[16][11]["lr"]
    # Continued from its own checkpoint, a branch is the same cooldown over the same samples.
    again, _ = run(
        corpus,
        16,
        [WSDAnneal(ANNEAL)],
        schedule=COOLDOWN,
        weights=MIX,
        ckpt_path=tmp_path / "branch-16" / "step-00000010",
    )
    assert again == within(branches[16], 10, 16)
    assert contents(trunk.parent) == before


def test_ramp_stages_and_anneal_account_for_every_token(corpus: Path) -> None:
    """Batches of 64, 128 and 256 tokens, sequences of 16 then 32, two mixes: all boundaries at their exact step."""
    ramp = [[0, 64], [256, 128], [1024, 256]]  # 4 steps, 6 steps, then 256 a step
    steps, trainer = run(
        corpus,
        20,
        [WSDAnneal(ANNEAL), LongContext([LongStage(2 * T, from_tokens=500)])],
        schedule=WSD,
        weights=MIX,
        batch_ramp=ramp,
        micro_batch_size=2,
    )
    takes = [64] * 4 + [128] * 6 + [256] * 10
    lengths = [T] * 6 + [2 * T] * 14  # 500 tokens are reached inside the second step of 128: 4 x 64 + 2 x 128 = 512
    assert [sum(map(len, seen["input_ids"])) for seen in steps.values()] == takes
    assert [len(seen["input_ids"][0]) for seen in steps.values()] == lengths
    plan = trainer.datamodule.plan
    assert [(plan.first_step(i), stage.from_tokens) for i, stage in enumerate(plan.stages)] == [
        (0, 0), (6, 500), (15, sum(takes[:15])),
    ]  # fmt: skip
    assert plan.tokens_by_length(20) == [(T, 512), (2 * T, sum(takes[6:15])), (2 * T, 5 * 256)]
    assert set(drawn(within(steps, 0, 15))) == {"prose", "code"}
    assert set(drawn(within(steps, 15, 20))) == {"reference", "code"}
    table = {row.source: row.tokens_drawn for row in trainer.datamodule.epoch_table()}
    assert sum(table.values()) == sum(takes) == plan.ramp.tokens(20)
    assert table["reference"] == 5 * 256 / 2 and table["prose"] == 0.75 * sum(takes[:15])


def test_mistakes_are_one_line(corpus: Path) -> None:
    def error(callbacks, **settings) -> str:
        with pytest.raises(ConfigError) as caught:
            run(corpus, 16, callbacks, **settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "needs schedule.kind wsd or cooldown" in error([WSDAnneal(ANNEAL)], schedule=ScheduleConfig("cosine"))
    assert "unknown source 'poetry'" in error([WSDAnneal({"poetry": 1})], schedule=WSD)
    assert "two callbacks WSDAnneal" in error([WSDAnneal(ANNEAL), WSDAnneal(MIX)], schedule=WSD)
    both = LongContext([LongStage(T, from_tokens=12 * G - 5, weights=MIX)])
    assert "LongContext and WSDAnneal both set weights at step 12" in error([WSDAnneal(ANNEAL), both], schedule=WSD)
    whole = ScheduleConfig("wsd", decay_fraction=1.0)
    assert "WSDAnneal: a later stage starts at 0 tokens" in error([WSDAnneal(ANNEAL)], schedule=whole)
