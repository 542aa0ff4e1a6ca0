"""Loss, perplexity and bits per byte of text.

Perplexity counts per token, and tokens are what a tokenizer makes of a text: 250 tokens at perplexity 18 and 400 tokens
at perplexity 12 of the same 1,000 bytes are 1.04 and 1.43 bits per byte, so the second model is the worse one. Reports
lead with bits per byte, the only one of the three that compares across tokenizers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.data.shards import Manifest
from lm.data.tokenizer import byte_lengths, encode_documents, tokenizer_of
from lm.data.windows import WindowReader
from lm.errors import ConfigError
from lm.loss import IGNORE
from lm.model import Llama

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_TOKENS = 8192

# (input_ids [B, T], labels [B, T], document_ids [B, T] or None) -> nats of each label, [B, T], 0 where it is IGNORE.
# Under a strategy that shares a model out, every rank has to call it alike.
Scorer = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class TextScore:
    """What a text costs.

    Attributes:
        nats: -ln of the probability of all scored tokens.
        tokens: scored tokens. The first token of a document has nothing before it and is not scored.
        n_bytes: UTF-8 bytes of the scored tokens.
    """

    nats: float
    tokens: int
    n_bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """nats / bytes / ln 2."""
        return self.nats / self.n_bytes / math.log(2) if self.n_bytes else math.nan

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(self.nats + other.nats, self.tokens + other.tokens, self.n_bytes + other.n_bytes)

    def as_dict(self) -> dict[str, float]:
        """Plain values, bits per byte first."""
        return {
            "bits_per_byte": self.bits_per_byte, "loss": self.loss, "perplexity": self.perplexity,
            "tokens": self.tokens, "bytes": self.n_bytes,
        }  # fmt: skip


NOTHING = TextScore(0.0, 0, 0)


def scorer(model: Llama) -> Scorer:
    """Scores by a model that this process has to itself."""
    return partial(losses, model)


@torch.no_grad()
def losses(model: Llama, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Nats of each label, [B, T] fp64 on the CPU, 0 where it is IGNORE; the model in evaluation mode for the time."""
    device, training = model.embedding.weight.device, model.training
    model.eval()
    try:
        ids = None if document_ids is None else document_ids.to(device)
        nll: Tensor = model(input_ids.to(device), ids, labels.to(device))
        return nll.double().cpu()
    finally:
        model.train(training)


def score_source(
    score: Scorer,
    manifest: Manifest,
    source: str,
    window: int,
    max_windows: int | None = None,
    split: str = "validation",
) -> TextScore:
    """Windows of a source's split, cut and masked at document ends as in training.

    Args:
        window: T in tokens.
        max_windows: at most this many, spread evenly over the split; None for all.
    """
    reader = WindowReader(manifest, split, [source])
    count = reader.count_windows(0, window)
    chosen = np.arange(count)
    if max_windows is not None and max_windows < count:
        chosen = np.arange(max_windows) * count // max_windows
    n_bytes = byte_lengths(tokenizer_of(manifest))
    total = NOTHING
    for part in _parts(chosen, max(1, BATCH_TOKENS // window)):
        batch = reader.batch(np.zeros(len(part), dtype=np.int64), part, window)
        nll = score(batch["input_ids"], batch["labels"], batch["document_ids"])
        labels = batch["labels"][batch["labels"] != IGNORE].numpy()
        total += TextScore(float(nll.sum()), len(labels), int(n_bytes[labels].sum()))
    return total


def check_context(context: int, window: int) -> None:
    """Raise ConfigError where windows would not move on."""
    if not 0 <= context < window:
        raise ConfigError(f"context must be from 0 to window - 1 = {window - 1}, got {context}")


def score_document(
    score: Scorer, ids: NDArray[Any] | Sequence[int], n_bytes: NDArray[np.int64], window: int, context: int
) -> TextScore:
    """One document of any length, each token but the first scored once.

    Args:
        ids: tokens.
        n_bytes: bytes by id, see lm.data.tokenizer.byte_lengths.
        window: T in tokens.
        context: tokens that every label of a later window has at least before it; windows overlap by this much.
    """
    check_context(context, window)
    tokens = torch.as_tensor(np.asarray(ids, dtype=np.int64))
    if len(tokens) < 2:
        return NOTHING
    starts = list(range(0, max(len(tokens) - 1 - context, 1), window - context))
    nats = 0.0
    for part in _parts(np.array(starts), max(1, BATCH_TOKENS // window)):
        rows = [_window(tokens, int(start), window, context) for start in part]
        width = max(len(row) for row, _ in rows)
        inputs = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row, _ in rows])
        labels = torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=IGNORE) for _, row in rows])
        nats += float(score(inputs, labels, None).sum())
    scored = tokens[1:].numpy()
    return TextScore(nats, len(scored), int(n_bytes[scored].sum()))


def _window(tokens: Tensor, start: int, window: int, context: int) -> tuple[Tensor, Tensor]:
    """(inputs, labels) from `start` on; labels that an earlier window has scored are IGNORE."""
    inputs = tokens[start : start + window][: len(tokens) - 1 - start]
    labels = tokens[start + 1 : start + 1 + len(inputs)].clone()
    if start:
        labels[:context] = IGNORE
    return inputs, labels


def read_documents(path: Path, field: str = "text") -> list[str]:
    """Documents of a file: those of a JSONL by its field, else the whole file as one.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or a line of it has no such field.
    """
    if path.suffix != ".jsonl":
        return [read_utf8(path)]
    return [_field(row, field, where) for where, row in json_lines(path)]


def read_utf8(path: Path) -> str:
    """Text of a file, without the byte order mark that some editors put before it.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}; convert it") from None


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, value) of each line of a JSONL file that is not blank.

    Raises:
        ConfigError: see read_utf8; or a line is not JSON.
    """
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not JSON ({error})") from None


def encodable(text: str, where: str) -> str:
    """The text.

    Raises:
        ConfigError: it holds half a surrogate pair, which is no character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds a lone surrogate, which no tokenizer can encode") from None
    return text


def _field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        raise ConfigError(f"{where}: no text in field {field!r}")
    return encodable(row[field], where)


def score_file(
    score: Scorer, tokenizer: Tokenizer, path: Path, window: int, context: int, field: str = "text"
) -> TextScore:
    """All documents of a text or JSONL file; end-of-text itself is not scored, since a file may be a fragment."""
    lengths = byte_lengths(tokenizer)
    total = NOTHING
    for ids in encode_documents(tokenizer, read_documents(path, field)):
        total += score_document(score, ids[:-1], lengths, window, context)
    if not total.tokens:
        raise ConfigError(f"{path} has no document of two tokens or more")
    return total


def _parts(values: NDArray[Any], size: int) -> Iterator[NDArray[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
