"""What a tokenizer makes of the text of a data folder: by source, by language, and how much of its vocabulary is used.

What a language costs is its tokens for the content that one English token holds. With parallel texts that is a count
of tokens. Without them content has to be guessed from length, and neither unit is fair: a Telugu letter is three
UTF-8 bytes, so bytes flatter Telugu, and a Chinese character says about what three Latin letters do, so characters
flatter English. Here a character counts 1, and a Han, kana or Hangul character 3: its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.shards import Manifest, TokenStream
from lm.data.tokenizer import byte_lengths, end_of_text_id, tokenizer_of

Int64Array = NDArray[np.int64]

UNKNOWN = "unknown"
MAX_COST = 2.0
MIN_CHARACTERS = 1000  # of a language before it is warned of: less is names, quotations, or a wrong guess
MIN_PROBABILITY = 0.65  # as of the stage `language`
COVERED = 0.99
_DENSE = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_DENSE_CHARACTERS = 3
_BATCH_TOKENS = 1 << 20


@dataclass
class TextCounts:
    """Sums over some documents; end-of-text is in none of them.

    Attributes:
        ids: int64 [vocab_size], how often each id occurs.
        words: parts between white space.
        content: characters, dense scripts counted threefold.
    """

    ids: Int64Array
    documents: int = 0
    characters: int = 0
    words: int = 0
    content: int = 0

    def add(self, ids: Int64Array, text: str) -> None:
        """One more document: its ids and its text."""
        np.add.at(self.ids, ids, 1)
        self.documents += 1
        self.characters += len(text)
        self.words += len(text.split())
        dense = 0 if text.isascii() else len(_DENSE.findall(text))
        self.content += len(text) + (_DENSE_CHARACTERS - 1) * dense

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return int(self.ids.sum())


@dataclass(frozen=True)
class TextRow:
    """One source or language.

    Attributes:
        single_byte: share of the tokens that are one byte, of any kind.
        partial: share of the tokens that are no whole characters: what a script falls to that the tokenizer lacks.
        cost: tokens for as much content, relative to English; None without English text, and for sources.
    """

    name: str
    documents: int
    tokens: int
    characters: int
    bytes_per_token: float
    characters_per_token: float
    tokens_per_word: float
    single_byte: float
    partial: float
    cost: float | None = None


@dataclass(frozen=True)
class TokenizerReport:
    """All of it.

    Attributes:
        tokens_read, tokens_in_all: of the train splits, end-of-text included; documents are read evenly.
        never_seen: ids that do not occur in what was read, end-of-text and special tokens left out.
        covering: of the vocabulary, the share whose tokens are 99% of the text.
        parallel: language -> tokens relative to English, from parallel texts.
        notes: what could not be told, and why.
    """

    vocab_size: int
    tokens_read: int
    tokens_in_all: int
    never_seen: int
    covering: float
    sources: list[TextRow]
    languages: list[TextRow]
    parallel: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def warnings(self) -> list[str]:
        """A line for each language that costs over twice what English does; parallel texts count where there are."""
        lines = [
            f"language {name} costs {cost:.1f} times as many tokens as English (parallel texts)"
            for name, cost in self.parallel.items()
            if cost > MAX_COST
        ]
        lines += [
            f"language {row.name} costs about {row.cost:.1f} times as many tokens as English (by characters)"
            for row in self.languages
            if row.cost is not None
            and row.cost > MAX_COST
            and row.characters >= MIN_CHARACTERS
            and row.name not in (*self.parallel, UNKNOWN)
        ]
        advice = "; a larger vocabulary, or more of its text in the tokenizer's sample, makes it cheaper"
        return [line + advice for line in lines]


def tokenizer_report(
    manifest: Manifest,
    languages: Mapping[str, str],
    identify: Callable[[str], str] | None,
    parallel: Mapping[str, str] | None = None,
    max_tokens: int = 20_000_000,
) -> TokenizerReport:
    """The report of a data folder's train splits.

    Args:
        languages: source -> declared language of all of its documents.
        identify: text -> language, for the other sources; None: theirs is unknown.
        parallel: language -> text that says the same in each; needs `en`.
        max_tokens: most tokens read of a source: one of every n documents.
    """
    tokenizer = tokenizer_of(manifest)
    size = manifest.vocab_size
    by_source = {name: TextCounts(np.zeros(size, np.int64)) for name in manifest.source_names}
    by_language: dict[str, TextCounts] = {}
    for name, counts in by_source.items():
        for ids, text in _documents(manifest, name, tokenizer, max_tokens):
            language = languages.get(name) or (identify(text) if identify else UNKNOWN)
            counts.add(ids, text)
            by_language.setdefault(language, TextCounts(np.zeros(size, np.int64))).add(ids, text)
    kinds = _Kinds.of(tokenizer)
    english = by_language.get("en")
    rate = english.tokens / english.content if english and english.content else None
    ranked = sorted(by_language.items(), key=lambda item: (-item[1].tokens, item[0]))
    rows = [_row(name, counts, kinds, rate) for name, counts in ranked]
    never_seen, covering = _vocabulary(by_source.values(), kinds)
    return TokenizerReport(
        vocab_size=size,
        tokens_read=sum(counts.tokens + counts.documents for counts in by_source.values()),
        tokens_in_all=sum(manifest.tokens("train").values()),
        never_seen=never_seen,
        covering=covering,
        sources=[_row(name, counts, kinds) for name, counts in by_source.items()],
        languages=rows,
        parallel=_parallel(tokenizer, parallel or {}),
        notes=[] if rate else ["no document is in English: what a language costs relative to it is not told"],
    )


def _documents(manifest: Manifest, name: str, tokenizer: Any, max_tokens: int) -> Iterator[tuple[Int64Array, str]]:
    """(ids, text) of the first of every n documents of a source, so that about max_tokens are read, and never more."""
    stream = TokenStream(manifest, name, "train")
    every = -(-stream.n_tokens // max_tokens)
    batch: list[Int64Array] = []
    tokens = number = 0
    left = max_tokens
    for start, ends in stream.shard_ends():
        starts = np.concatenate([[0], ends[:-1] + 1]) + start
        for begin, end in zip(starts.tolist(), (ends + start).tolist(), strict=True):
            number += 1
            if (number - 1) % every or not left:
                continue
            ids = np.empty(min(end - begin, left), dtype=np.int64)  # without its end-of-text
            stream.read_into(begin, ids)
            batch.append(ids)
            tokens, left = tokens + len(ids), left - len(ids)
            if tokens >= _BATCH_TOKENS:
                yield from _decoded(batch, tokenizer)
                batch, tokens = [], 0
    yield from _decoded(batch, tokenizer)


def _decoded(batch: Sequence[Int64Array], tokenizer: Any) -> Iterator[tuple[Int64Array, str]]:
    texts = tokenizer.decode_batch([ids.tolist() for ids in batch], skip_special_tokens=False)
    return zip(batch, texts, strict=True)


@dataclass(frozen=True)
class _Kinds:
    """Of each id: its bytes, whether it is one byte, whether it is no whole characters, whether text can hold it."""

    lengths: Int64Array
    single: NDArray[np.bool_]
    partial: NDArray[np.bool_]
    text: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Any) -> _Kinds:
        lengths = byte_lengths(tokenizer)
        partial = np.zeros(len(lengths), dtype=bool)
        text = np.ones(len(lengths), dtype=bool)
        spelled = _byte_of_character()
        for token, index in tokenizer.get_vocab().items():
            try:
                bytes(spelled[character] for character in token).decode()
            except UnicodeDecodeError:
                partial[index] = True
            except KeyError:  # a token that was added as it is
                continue
        for index in tokenizer.get_added_tokens_decoder():
            text[index] = False
        text[end_of_text_id(tokenizer)] = False
        return cls(lengths, lengths == 1, partial, text)


def _byte_of_character() -> dict[str, int]:
    """The byte of each character of a byte-level token: printable Latin-1 stands for itself, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _row(name: str, counts: TextCounts, kinds: _Kinds, english_rate: float | None = None) -> TextRow:
    tokens = max(1, counts.tokens)
    rate = counts.tokens / max(1, counts.content)
    return TextRow(
        name=name,
        documents=counts.documents,
        tokens=counts.tokens,
        characters=counts.characters,
        bytes_per_token=float(counts.ids @ kinds.lengths) / tokens,
        characters_per_token=counts.characters / tokens,
        tokens_per_word=counts.tokens / max(1, counts.words),
        single_byte=float(counts.ids[kinds.single].sum()) / tokens,
        partial=float(counts.ids[kinds.partial].sum()) / tokens,
        cost=None if english_rate is None else rate / english_rate,
    )


def _vocabulary(parts: Any, kinds: _Kinds) -> tuple[int, float]:
    """(ids that text can hold and none does, share of the vocabulary that is 99% of the tokens)."""
    counts = np.sum([part.ids for part in parts], axis=0)
    falling = np.sort(counts)[::-1]
    needed = int(np.searchsorted(np.cumsum(falling), COVERED * falling.sum())) + 1
    return int(np.sum((counts == 0) & kinds.text)), needed / len(counts)


def _parallel(tokenizer: Any, texts: Mapping[str, str]) -> dict[str, float]:
    counts = {name: len(tokenizer.encode(text, add_special_tokens=False).ids) for name, text in texts.items()}
    return {name: count / counts["en"] for name, count in counts.items() if name != "en"}
