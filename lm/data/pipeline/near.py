"""Near-duplicates by MinHash and locality-sensitive hashing (Broder 1997; FineWeb, arXiv 2406.17557, section 3.4).

A document is the set of its word 5-grams. k = b x r minimum hashes estimate the Jaccard index J of two sets, with a
standard error of sqrt(J (1 - J) / k); two documents are candidates if all r hashes of one of b bands agree, which
happens with probability 1 - (1 - J^r)^b. Candidates are joined transitively and one document a cluster is kept.
With `min_similarity` a candidate also needs that estimate of J, so that many narrow bands (b 20, r 5) may cast wide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.pipeline.stage import FRACTION, Dropped, Kept, Outcome, Range, StageKind
from lm.data.pipeline.store import Documents, Part
from lm.data.words import each_word, words

_BATCH_WORDS = 1 << 20
_VOCABULARY = 1 << 20  # words whose hash is remembered
_LONG_CHARACTERS = 1 << 20  # of a text whose words are not held all at once
_MIX = np.uint64(0x9E3779B97F4A7C15)


class _WordHashes(dict[str, int]):
    """Word -> 64-bit hash, the same in every process (unlike `hash`); remembers a bounded number of them."""

    def __missing__(self, word: str) -> int:
        found = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little", signed=True)
        if len(self) < _VOCABULARY:
            self[word] = found
        return found


class Shingles:
    """Hashes of word n-grams."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._hashes = _WordHashes()

    def of(self, text: str) -> NDArray[np.uint64]:
        """Hashes of the text's n-grams; of all its words as one, if they are fewer than n. uint64 [n-grams]."""
        found = words(text) if len(text) < _LONG_CHARACTERS else each_word(text)
        hashes = np.fromiter(map(self._hashes.__getitem__, found), np.int64).view(np.uint64)
        if not len(hashes):  # nothing but marks: equal to its like only
            hashes = np.array([self._hashes[text]], np.int64).view(np.uint64)
        n = min(self.n, len(hashes))
        count = len(hashes) - n + 1
        state = np.zeros(count, np.uint64)
        for i in range(n):
            state = (state ^ hashes[i : i + count]) * _MIX
            state ^= state >> np.uint64(29)
        return state


def signatures(texts: Iterable[str], k: int, n: int = 5, seed: int = 0) -> NDArray[np.uint32]:
    """MinHash signatures by rensa; uint32 [documents, k]. The share of equal entries of two rows estimates J."""
    shingles = Shingles(n)
    parts: list[NDArray[np.uint32]] = [np.empty((0, k), np.uint32)]
    rows: list[NDArray[np.uint64]] = []
    held = 0
    for text in texts:
        rows.append(shingles.of(text))
        held += len(rows[-1])
        if held >= _BATCH_WORDS:
            parts.append(_digests(rows, k, seed))
            rows, held = [], 0
    if rows:
        parts.append(_digests(rows, k, seed))
    return np.concatenate(parts)


def _digests(rows: Sequence[NDArray[np.uint64]], k: int, seed: int) -> NDArray[np.uint32]:
    from rensa import RMinHash

    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(rows), offsets, k, seed)
    return np.array(matrix.to_rows(), dtype=np.uint32).reshape(len(rows), k)


def bands(signature: NDArray[np.uint32], b: int, r: int) -> Iterator[NDArray[np.int64]]:
    """Per band, the number of the bucket each document falls in; int64 [documents]."""
    for band in range(b):
        columns = np.ascontiguousarray(signature[:, band * r : (band + 1) * r])
        keys = columns.view(np.dtype((np.void, 4 * r))).ravel()
        yield np.unique(keys, return_inverse=True)[1].ravel()


def candidate_pairs(
    signature: NDArray[np.uint32], b: int, r: int, min_similarity: float = 0.0, span: int = 32
) -> NDArray[np.int64]:
    """Pairs (i, j), i < j, that share a bucket, each once; int64 [pairs, 2].

    Args:
        min_similarity: pairs whose signatures agree in a smaller share of their entries are left out.
        span: a document is paired with as many before it in a bucket at most, so that a bucket of a million copies
            gives 32 million pairs and not 5e11; the pairs left out are joined through those between.
    """
    n = len(signature)
    codes = [np.empty(0, np.int64)]
    for bucket in bands(signature, b, r):
        order = np.argsort(bucket, kind="stable")
        sorted_bucket = bucket[order]
        for shift in range(1, min(span, n - 1) + 1):
            same = np.flatnonzero(sorted_bucket[shift:] == sorted_bucket[:-shift])
            if not len(same):
                break
            codes.append(order[same] * n + order[same + shift])
    code = np.unique(np.concatenate(codes))
    pairs = np.stack([code // max(n, 1), code % max(n, 1)], axis=1)
    if min_similarity <= 0:
        return pairs
    steps = range(0, len(pairs), 1 << 14)
    alike = [
        np.mean(signature[p[:, 0]] == signature[p[:, 1]], axis=1) for p in (pairs[i : i + (1 << 14)] for i in steps)
    ]
    return pairs[np.concatenate([np.empty(0), *alike]) >= min_similarity]


def clusters(signature: NDArray[np.uint32], b: int, r: int, min_similarity: float = 0.0) -> NDArray[np.int64]:
    """Cluster of each document: candidates, and their candidates, transitively; int64 [documents]."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(signature)
    # Any pair will do where all count: a chain through a bucket joins it as well as all its pairs.
    pairs = candidate_pairs(signature, b, r, min_similarity, span=32 if min_similarity > 0 else 1)
    graph = coo_array((np.ones(len(pairs), np.int8), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def near_duplicates(documents: Documents, options: dict[str, Any]) -> Iterator[Outcome]:
    """Keep one document of every cluster of near-duplicates. Memory: 4 k bytes a document."""
    b, r, n = (options[name] for name in ("bands", "rows", "ngram"))
    keep, least, seed = (options[name] for name in ("keep", "min_similarity", "seed"))
    signature = np.concatenate([np.empty((0, b * r), np.uint32), *documents.gather(_part_signatures, b * r, n, seed)])
    cluster = clusters(signature, b, r, least)
    chosen = _chosen(cluster, documents.sizes(), keep)
    del signature
    sizes = np.bincount(cluster) if len(cluster) else cluster
    for position, number in enumerate(cluster.tolist()):
        if chosen[number] == position:
            yield Kept()
        else:
            detail = f"one of {int(sizes[number])}; kept: document {int(chosen[number])} of this stage's input"
            yield Dropped("near-duplicate", detail)


def _part_signatures(part: Part, k: int, n: int, seed: int) -> NDArray[np.uint32]:
    return signatures((item.string for item in part), k, n, seed)


def _chosen(cluster: NDArray[np.int64], sizes: NDArray[np.int64], keep: str) -> NDArray[np.int64]:
    """Position of the document that is kept of each cluster; int64 [clusters]."""
    order = np.arange(len(cluster)) if keep == "first" else np.argsort(-sizes, kind="stable")
    numbers, first = np.unique(cluster[order], return_index=True)
    chosen = np.zeros(len(numbers), np.int64)
    chosen[numbers] = order[first]
    return chosen


KINDS = {
    "near_duplicates": StageKind(
        near_duplicates,
        {"ngram": 5, "bands": 14, "rows": 8, "min_similarity": 0.0, "keep": "first", "seed": 0},
        {
            **dict.fromkeys(("ngram", "bands", "rows"), Range(1, 10_000, True)),
            "min_similarity": FRACTION,
            "keep": ("first", "longest"),
            "seed": Range(0, 2**64 - 1, True),
        },
        compares=True,
        packages=("rensa",),
        version=2,
    ),
}
