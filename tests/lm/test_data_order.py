"""Data order: bijections, exact counts, stages, skipped ranges, cost."""

import time

import numpy as np
import pytest

from lm.data.blocks import BLOCK_SAMPLES, block_counts, largest_remainder
from lm.data.order import DataOrder, DataPlan, Stage, merge_ranges
from lm.data.permute import key_of, permute

TOKENS = {"a": 40_001, "b": 12_345, "c": 5_000}
MIX = {"a": 0.5, "b": 0.3, "c": 0.2}
T, G = 16, 16 * 8


ONE_STAGE = (Stage(0, T, MIX),)


def make_order(stages=ONE_STAGE, tokens=TOKENS, seed=3, skipped=()) -> DataOrder:
    return DataOrder(DataPlan(seed, G, tuple(stages)), tokens, skipped)


def draws_of(order: DataOrder, source: int, n_samples: int) -> np.ndarray:
    """Windows of one source in the order of k."""
    sources, windows = order.locate(np.arange(n_samples))
    return windows[sources == source]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 31, 64, 65, 1000, 4097, 65_536])
def test_permutation_is_a_bijection(n: int) -> None:
    for key in (0, 1, key_of("x")):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permutation_takes_one_domain_and_key_per_element() -> None:
    n, keys = np.array([10, 1000, 10]), np.array([1, 2, 3], dtype=np.uint64)
    got = permute(np.array([5, 500, 5]), n, keys)
    alone = [permute(np.array([x]), int(m), int(k))[0] for x, m, k in zip((5, 500, 5), n, keys, strict=True)]
    assert got.tolist() == alone


def test_permutation_is_pinned() -> None:
    """A changed permutation would silently change the order of every resumed run."""
    assert permute(np.arange(10), 10, key_of("epoch", 0, "prose", 128)).tolist() == [5, 8, 3, 2, 1, 6, 9, 4, 0, 7]


def test_permutations_are_uniform_over_keys() -> None:
    n, trials = 12, 6000
    keys = np.arange(trials, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    counts = np.zeros((n, n))
    for x in range(n):
        counts[x] = np.bincount(permute(np.full(trials, x), n, keys), minlength=n)
    chi2 = ((counts - trials / n) ** 2 / (trials / n)).sum()
    assert chi2 < (n - 1) ** 2 + 5 * np.sqrt(2 * (n - 1) ** 2)  # mean + 5 sd of the statistic


def test_neighbours_keep_no_fixed_distance() -> None:
    """The fault of affine maps: in every epoch, the same step between neighbours."""
    n = 5000
    for key in range(5):
        gaps = np.diff(permute(np.arange(n), n, key)) % n
        assert np.bincount(gaps, minlength=n).max() < 12


def test_every_epoch_visits_every_window_once() -> None:
    order = make_order()
    for source, name in enumerate(TOKENS):
        n_windows = (TOKENS[name] - 1) // T
        seen = draws_of(order, source, 64 * BLOCK_SAMPLES)
        epochs = len(seen) // n_windows
        assert epochs >= 8
        for epoch in seen[: epochs * n_windows].reshape(epochs, n_windows):
            assert np.array_equal(np.sort(epoch), np.arange(n_windows))


def test_consecutive_epochs_are_independent() -> None:
    order = make_order(tokens={"a": 16 * 2048 + 1}, stages=[Stage(0, T, {"a": 1})])
    windows = order.locate(np.arange(8 * 2048))[1].reshape(8, 2048)
    for first in range(8):
        assert np.array_equal(np.sort(windows[first]), np.arange(2048))
        for second in range(first + 1, 8):
            assert abs(np.corrcoef(windows[first], windows[second])[0, 1]) < 5 / np.sqrt(2048)
            assert (windows[first] == windows[second]).sum() < 10


def test_counts_of_each_block_are_exact() -> None:
    order = make_order()
    expected = largest_remainder(np.array(list(MIX.values())), BLOCK_SAMPLES)
    sources = order.locate(np.arange(5 * BLOCK_SAMPLES))[0].reshape(5, BLOCK_SAMPLES)
    for block in sources:
        assert np.array_equal(np.bincount(block, minlength=3), expected)
    assert not np.array_equal(sources[0], sources[1])


def test_mix_is_even_inside_a_block() -> None:
    """No runs of one source: eighths of a block hold each source in proportion, within chance."""
    sources = make_order().locate(np.arange(64 * BLOCK_SAMPLES))[0].reshape(-1, BLOCK_SAMPLES // 8)
    share = (sources == 0).mean(axis=1)
    assert abs(share.mean() - 0.5) < 0.001
    assert 0.03 < share.std() < 0.055  # sqrt(.25/128) = .044, a little less without replacement


def test_largest_remainder() -> None:
    assert largest_remainder(np.array([0.5, 0.3, 0.2]), 1024).tolist() == [512, 307, 205]
    assert largest_remainder(np.ones(3), 1024).tolist() == [342, 341, 341]
    assert largest_remainder(np.array([1.0, 0.0]), 7).tolist() == [7, 0]


def test_small_weights_grow_the_block() -> None:
    counts = block_counts(np.array([0.9997, 0.0003]))
    assert abs(counts[1] / counts.sum() / 0.0003 - 1) < 0.01


def test_order_of_the_weights_mapping_does_not_matter() -> None:
    backwards = dict(reversed(MIX.items()))
    k = np.arange(3000)
    for got, expected in zip(make_order([Stage(0, T, backwards)]).locate(k), make_order().locate(k), strict=True):
        assert np.array_equal(got, expected)


def test_seeds_differ() -> None:
    k = np.arange(2000)
    one, two = make_order(seed=1).locate(k), make_order(seed=2).locate(k)
    assert (one[0] == two[0]).mean() < 0.6 and (one[1] == two[1]).mean() < 0.1


def test_locate_is_pointwise() -> None:
    order = make_order()
    k = np.array([123_456, 5, 99, 5, 1_000_000])
    sources, windows = order.locate(k)
    for i, one in enumerate(k):
        assert order.locate(np.array([one])) == (sources[i], windows[i])


def test_steps_cover_k_without_gap_or_overlap_across_stages() -> None:
    stages = [Stage(0, T, MIX), Stage(10 * G - 3, 2 * T, {"a": 1}), Stage(20 * G, T, MIX)]
    order = make_order(stages)
    plan = order.plan
    assert [plan.first_step(i) for i in range(3)] == [0, 10, 20]  # the second is rounded up to a whole step
    assert [plan.stage_of_step(s) for s in (0, 9, 10, 19, 20, 500)] == [0, 0, 1, 1, 2, 2]
    assert [len(order.step_samples(s)) for s in (9, 10, 20)] == [8, 4, 8]
    k = np.concatenate([order.step_samples(step) for step in range(40)])
    assert np.array_equal(k, np.arange(10 * 8 + 10 * 4 + 20 * 8))
    sources, windows = order.locate(k[80:120])
    assert set(sources) == {0} and windows.max() < 40_000 // (2 * T)


def test_a_stage_of_the_same_length_repeats_no_window() -> None:
    """The epoch goes on through two changes of mix, and through a stage of another length."""
    tokens = {"a": T * 1000 + 1, "b": T * 1000 + 1}
    even, mostly_a = {"a": 0.5, "b": 0.5}, {"a": 0.9, "b": 0.1}
    stages = [Stage(0, T, even), Stage(37 * G, T, mostly_a), Stage(80 * G, 2 * T, even), Stage(90 * G, T, even)]
    order = make_order(stages, tokens)
    k = np.concatenate([order.step_samples(step) for step in range(600) if order.plan.stage_of_step(step) != 2])
    sources, windows = order.locate(k)
    for source in (0, 1):
        for epoch in windows[sources == source][:2000].reshape(2, 1000):
            assert np.array_equal(np.sort(epoch), np.arange(1000))


def test_skipped_ranges_are_jumped_over() -> None:
    plain, order = make_order(), make_order(skipped=[(80, 120), (16, 24), (120, 128)])
    assert order.skipped == [(16, 24), (80, 128)]
    k = np.concatenate([order.step_samples(step) for step in range(20)])
    expected = [i for i in range(300) if not (16 <= i < 24 or 80 <= i < 128)][: 20 * 8]
    assert k.tolist() == expected
    assert np.array_equal(order.step_samples(3, 5), k[24:64])  # many steps at once
    for got, other in zip(order.locate(k), plain.locate(k), strict=True):
        assert np.array_equal(got, other)


def test_skipping_does_not_move_the_next_stage() -> None:
    """Stages start at their step (where a schedule expects them) and see nothing that was skipped or trained on."""
    stages = [Stage(0, T, {"a": 1}), Stage(10 * G, T, {"a": 0.5, "b": 0.5})]
    order = make_order(stages, skipped=[(40, 72)])
    k = [order.step_samples(step) for step in range(20)]
    assert k[9].tolist() == list(range(72 + 32, 72 + 40)) and k[10][0] == 112
    sources, windows = order.locate(np.arange(112 + 80))
    seen = windows[sources == 0]
    assert len(np.unique(seen)) == len(seen)
    assert 1 in sources[112:] and 1 not in sources[:112]


def test_bad_skipped_range() -> None:
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        merge_ranges([(5, 3)])


def test_step_one_million_takes_well_under_a_second() -> None:
    order = DataOrder(DataPlan(0, 2**22, (Stage(0, 4096, MIX),)), {"a": 10**13, "b": 10**12, "c": 10**9})
    start = time.perf_counter()
    sources, windows = order.locate(order.step_samples(1_000_000))
    assert time.perf_counter() - start < 1
    assert len(sources) == 1024 and windows.min() >= 0 and windows[sources == 0].max() > 10**8


def test_tokens_drawn_follow_from_the_plan() -> None:
    order = make_order([Stage(0, T, {"a": 1}), Stage(10 * G, 2 * T, {"a": 1, "b": 3})])
    drawn = order.tokens_drawn(30 * G)
    assert drawn == {"a": 15 * G, "b": 15 * G, "c": 0}
    assert order.tokens_drawn(5 * G) == {"a": 5 * G, "b": 0, "c": 0}


def test_an_epoch_is_each_window_once_whatever_is_left_after_the_last() -> None:
    plan = DataPlan(0, G, (Stage(0, T, {"a": 1}), Stage(2 * G, 2 * T, {"a": 1})))
    order = DataOrder(plan, {"a": 4 * T})  # three windows of T and a rest; one of 2 T and as much again
    k = np.concatenate([order.step_samples(step) for step in range(4)])
    visits = [np.bincount(order.locate(part)[1]) for part in np.split(k, [2 * G // T])]
    assert [list(stage["a"]) for stage in order.by_stage(4 * G)] == [
        [2 * G, pytest.approx(visits[0].mean())], [2 * G, visits[1].mean()],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Stage(0, T, {"nope": 1})], "unknown source 'nope' in weights; prepared sources: a, b, c"),
        ([Stage(0, 2**20, {"c": 1})], "longer than the 5000 tokens of source 'c'"),
        (
            [Stage(0, 12, MIX)],
            "global_batch_tokens 128 is not a multiple of sequence_length 12; the nearest",
        ),
        ([Stage(0, T, {"a": -1})], "weights must be 0 or more"),
        ([Stage(0, T, {"a": 0})], "weights must be 0 or more with one above 0"),
        ([Stage(0, T, {"a": 1, "b": 1e-9})], "the weight of 'b' is below 1 in 1048576"),
        ([Stage(0, 0, MIX)], "sequence_length must be at least 1, got 0"),
        ([Stage(5, T, MIX)], "first stage with from_tokens 0"),
        ([Stage(0, T, MIX), Stage(G, T, MIX), Stage(G, T, MIX)], "stages must start at increasing"),
    ],
)
def test_bad_plans_are_one_clear_line(stages, message) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as caught:
        if stages[0].sequence_length == 2**20:
            DataOrder(DataPlan(0, 2**20, tuple(stages)), TOKENS)
        else:
            make_order(stages)
    assert "\n" not in str(caught.value)
