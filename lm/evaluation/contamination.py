"""Which texts of an evaluation the model has been trained on: shared n-grams of words.

13 words by default, as for GPT-3; words and the rule for short texts: lm.data.words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lm.data.shards import Manifest, TokenStream
from lm.data.tokenizer import tokenizer_of
from lm.data.words import LEAST_WORDS, lookup_ngrams, ngrams, words
from lm.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

N = 13
_BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class Overlap:
    """What one evaluation text shares with the training shards.

    Attributes:
        index: of the text.
        share: of its n-grams that were seen; NaN for a text that is too short to say.
        example: the first of them.
        source: where it was seen first.
    """

    index: int
    share: float
    example: str
    source: str


@dataclass(frozen=True)
class Contamination:
    """What a set of texts shares with the training data.

    Attributes:
        texts: how many were asked about.
        too_short: how many of them have fewer than 5 words (lm.data.words.lookup_ngrams).
        found: those that share an n-gram.
    """

    texts: int
    too_short: int
    found: tuple[Overlap, ...]

    @property
    def share(self) -> float:
        """Texts with at least one shared n-gram, of those long enough."""
        return len(self.found) / max(1, self.texts - self.too_short)


def check_ngram(n: int) -> None:
    """Raise ConfigError for n-grams so short that ordinary phrases would count."""
    if n < LEAST_WORDS:
        raise ConfigError(f"n-grams for contamination need {LEAST_WORDS} words or more, got {n}")


def check_contamination(manifest: Manifest, texts: Sequence[str], n: int = N) -> Contamination:
    """Read the train split of all sources once and look each n-gram of the texts up. Memory goes with the texts only.

    Raises:
        ConfigError: n is below LEAST_WORDS.
    """
    check_ngram(n)
    wanted: dict[int, set[str]] = {}  # length -> n-grams
    by_text: list[list[str]] = []
    for text in texts:
        length, grams = lookup_ngrams(text, n)
        by_text.append(grams)
        if grams:
            wanted.setdefault(length, set()).update(grams)
    seen = _look_up(manifest, wanted)
    overlaps = []
    for index, grams in enumerate(by_text):
        shared = [gram for gram in grams if gram in seen]
        if shared:
            overlaps.append(Overlap(index, len(shared) / len(grams), shared[0], seen[shared[0]]))
    return Contamination(len(texts), sum(not grams for grams in by_text), tuple(overlaps))


def _look_up(manifest: Manifest, wanted: dict[int, set[str]]) -> dict[str, str]:
    """The wanted n-grams that training text holds, each with the source it was met in first."""
    seen: dict[str, str] = {}
    tokenizer = tokenizer_of(manifest)
    for source in manifest.source_names:
        for text in documents(manifest, source, tokenizer):
            found = words(text)
            for length, grams in wanted.items():
                for gram in ngrams(found, length):
                    if gram in grams:
                        seen.setdefault(gram, source)
    return seen


def documents(manifest: Manifest, source: str, tokenizer: Tokenizer, split: str = "train") -> Iterator[str]:
    """Texts of a split, decoded from its shards one after the other."""
    stream = TokenStream(manifest, source, split)
    batch: list[list[int]] = []
    for before, ends in stream.shard_ends():
        start = before
        for end in (ends + before).tolist():
            ids = np.empty(end - start, dtype=np.int64)
            stream.read_into(start, ids)
            batch.append(ids.tolist())
            start = end + 1
            if len(batch) == _BATCH_DOCUMENTS:
                yield from tokenizer.decode_batch(batch)
                batch = []
    yield from tokenizer.decode_batch(batch)
