"""Near-duplicates against all pairs: recall, precision, estimates, clusters, which one is kept."""

import numpy as np
import pytest

from lm.data.pipeline.kinds import KINDS
from lm.data.pipeline.near import candidate_pairs, clusters, signatures
from lm.data.pipeline.stage import Dropped
from lm.data.pipeline.store import Documents, Item, StoreWriter
from recipes.bench_dedup import candidate_probability, planted_corpus, similar_pairs


def test_word_shingles_give_the_published_jaccard() -> None:
    """facts: word 3-shingles of two sentences share 3 of 7."""
    texts = ["the cat sat on the mat today", "The cat sat, on the rug today!"]
    estimates = []
    for seed in range(20):
        first, second = signatures(texts, 512, n=3, seed=seed)
        estimates.append((first == second).mean())
    assert np.mean(estimates) == pytest.approx(3 / 7, abs=0.02)


@pytest.mark.parametrize(
    ("b", "r", "expected"),  # facts, Data
    [
        (14, 8, {0.5: 0.053, 0.6: 0.211, 0.7: 0.564, 0.75: 0.772, 0.8: 0.923, 0.9: 1.0}),
        (20, 5, {0.5: 0.470, 0.6: 0.802, 0.7: 0.975, 0.75: 0.996, 0.8: 1.0}),
        (9, 13, {0.5: 0.001, 0.6: 0.012, 0.7: 0.084, 0.75: 0.195, 0.8: 0.399, 0.9: 0.929}),
    ],
)
def test_measured_candidates_follow_the_formula(b: int, r: int, expected: dict[float, float]) -> None:
    """Sets of a known Jaccard index: the share found is 1 - (1 - J^r)^b, as published and as measured."""
    from lm.data.pipeline.near import _digests

    rng = np.random.default_rng(0)
    for jaccard, probability in expected.items():
        assert candidate_probability(jaccard, b, r) == pytest.approx(probability, abs=6e-4)
    trials = 1500
    for jaccard in (0.6, 0.8):
        shared = 160
        own = round(shared * (1 - jaccard) / jaccard / 2)
        exact = shared / (shared + 2 * own)
        rows = []
        for _ in range(trials):
            values = rng.integers(0, 1 << 63, shared + 2 * own).astype(np.uint64)
            rows += [values[: shared + own], np.concatenate([values[:shared], values[shared + own :]])]
        signature = _digests(rows, b * r, 0).reshape(trials, 2, b, r)
        found = (signature[:, 0] == signature[:, 1]).all(-1).any(-1).mean()
        wanted = candidate_probability(exact, b, r)
        # 4 standard errors: rensa's permutations are not fully independent, and this would show it
        assert found == pytest.approx(wanted, abs=4 * np.sqrt(wanted * (1 - wanted) / trials) + 0.02)


def test_planted_near_duplicates_are_found_and_nothing_else() -> None:
    texts = planted_corpus(1500, seed=1)
    truth = similar_pairs(texts, least=0.1)
    signature = signatures(texts, 128)
    errors = [abs((signature[i] == signature[j]).mean() - jaccard) for (i, j), jaccard in truth.items()]
    assert len(errors) > 150 and np.mean(errors) < 0.05
    pairs = {tuple(pair) for pair in candidate_pairs(signatures(texts, 100), 20, 5, 0.6).tolist()}
    near = {pair for pair, jaccard in truth.items() if jaccard >= 0.75}
    assert len(near & pairs) / len(near) >= 0.98
    assert sum(truth.get(pair, 0) >= 0.5 for pair in pairs) / len(pairs) >= 0.99


def test_clusters_are_transitive_and_agree_with_the_pairs() -> None:
    texts = planted_corpus(600, seed=2)
    signature = signatures(texts, 100)
    cluster = clusters(signature, 20, 5)
    parent = list(range(len(texts)))  # an independent union of all pairs

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, j in candidate_pairs(signature, 20, 5).tolist():
        parent[root(j)] = root(i)
    roots = [root(i) for i in range(len(texts))]
    assert len(set(roots)) < len(texts)
    assert len(set(zip(roots, cluster.tolist(), strict=True))) == len(set(roots)) == len(set(cluster.tolist()))


def store(folder, texts: list[str]) -> Documents:
    folder.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(folder)
    for text in texts:
        writer.add(Item(text.encode()))
    writer.close()
    return Documents(folder)


@pytest.mark.parametrize(("keep", "kept"), [("first", [0, 2, 3, 5]), ("longest", [1, 2, 3, 5])])
def test_one_of_a_cluster_is_kept(tmp_path, keep: str, kept: list[int]) -> None:
    words = " ".join(f"word{i}" for i in range(200))
    texts = [words, words + " and one more", "short", "!!! ???", "!!! ???", "... ---"]  # marks only: equal or not
    kind = KINDS["near_duplicates"]
    outcomes = list(kind.run(store(tmp_path, texts), {**kind.options, "keep": keep}))
    assert [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Dropped)] == kept
