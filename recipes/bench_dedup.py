"""Near-duplicates on a corpus with planted ones: documents/s on one core, recall, precision, error of the estimates.

20,000 documents, one in five an edited copy of another (2 to 5% of its words replaced). The truth is the Jaccard index
of word 5-grams of all pairs that share any. Prints JSON:
    documents_per_second   signatures and clusters at (k, b, r) = (112, 14, 8), the default; median of the rounds
    estimate_error         mean absolute error of the MinHash estimate at k = 128, over pairs with J > .1
    settings               per (k, b, r) and least estimate: recall of pairs with J >= .75, the recall that
                           1 - (1 - J^r)^b expects of them, share of found pairs with J >= .5, documents dropped
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from statistics import median

import numpy as np

from lm.data.words import ngrams, words
from recipes.command import command_parser

SETTINGS = ((112, 14, 8, 0.0), (100, 20, 5, 0.0), (100, 20, 5, 0.6), (117, 9, 13, 0.0))


def planted_corpus(n: int, seed: int) -> list[str]:
    """n texts of 60 to 400 words with Zipf-like frequencies; one in five is an edited copy of an earlier original."""
    rng = np.random.default_rng(seed)
    vocabulary = np.array([f"{a}{b}{c}" for a in "bcdfghklmnprst" for b in "aeiou" for c in range(300)])
    frequency = 1 / np.arange(1, len(vocabulary) + 1)
    frequency /= frequency.sum()
    originals = [rng.choice(vocabulary, rng.integers(60, 401), p=frequency) for _ in range(n - n // 5)]
    copies = []
    for source in rng.integers(0, len(originals), n // 5):
        edited = originals[source].copy()
        places = rng.random(len(edited)) < rng.uniform(0.02, 0.05)
        edited[places] = rng.choice(vocabulary, places.sum())
        copies.append(edited)
    texts = [" ".join(text) for text in originals + copies]
    return [texts[i] for i in rng.permutation(n)]


def similar_pairs(texts: list[str], least: float) -> dict[tuple[int, int], float]:
    """Exact Jaccard index of word 5-grams of every pair above `least`: all pairs, through an inverted index."""
    sets = [set(ngrams(words(text), 5)) for text in texts]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, grams in enumerate(sets):
        for gram in grams:
            holders[gram].append(number)
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for numbers in holders.values():
        for place, i in enumerate(numbers):
            for j in numbers[place + 1 :]:
                shared[i, j] += 1
    found = {(i, j): n / (len(sets[i]) + len(sets[j]) - n) for (i, j), n in shared.items()}
    return {pair: jaccard for pair, jaccard in found.items() if jaccard > least}


def candidate_probability(jaccard: float, b: int, r: int) -> float:
    """Probability that two sets share a bucket: 1 - (1 - J^r)^b."""
    return 1 - (1 - jaccard**r) ** b


def run(argv: list[str]) -> None:
    """`recipes.bench dedup`."""
    parser = command_parser("recipes.bench dedup", __doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    print(json.dumps(measure(arguments.documents, arguments.rounds, arguments.seed), indent=1))


def measure(n: int, rounds: int, seed: int) -> dict[str, object]:
    """What `run` prints."""
    from lm.data.pipeline.near import candidate_pairs, clusters, signatures

    texts = planted_corpus(n, seed)
    seconds = []
    for _ in range(rounds):
        start = time.process_time()  # of this process alone: other work on the machine does not count
        clusters(signatures(texts, 112), 14, 8)
        seconds.append(time.process_time() - start)
    truth = similar_pairs(texts, least=0.1)
    near = {pair: jaccard for pair, jaccard in truth.items() if jaccard >= 0.75}
    signature = signatures(texts, 128)
    errors = [abs((signature[i] == signature[j]).mean() - jaccard) for (i, j), jaccard in truth.items()]
    settings = []
    for k, b, r, least in SETTINGS:
        signature = signatures(texts, k)
        pairs = {(i, j) for i, j in candidate_pairs(signature, b, r, least).tolist()}
        right = sum(truth.get(pair, 0.0) >= 0.5 for pair in pairs)
        settings.append(
            {
                "k": k,
                "b": b,
                "r": r,
                "min_similarity": least,
                "recall_above_0.75": len(near.keys() & pairs) / max(1, len(near)),
                "expected_recall": float(np.mean([candidate_probability(j, b, r) for j in near.values()])),
                "precision_above_0.5": right / max(1, len(pairs)),
                "pairs": len(pairs),
                "dropped": n - len(set(clusters(signature, b, r, least).tolist())),
            }
        )
    return {
        "documents": n,
        "words": sum(len(text.split()) for text in texts),
        "documents_per_second": round(n / median(seconds)),
        "pairs_above_0.1": len(truth),
        "pairs_above_0.75": len(near),
        "estimate_error": float(np.mean(errors)),
        "settings": settings,
    }
