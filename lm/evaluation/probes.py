"""Run long-context probes, and loss by position: what the window is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.shards import Manifest, TokenStream
from lm.evaluation.contamination import documents
from lm.evaluation.long_context import make_probe, sentences_of
from lm.evaluation.questions import Question, Writer, ask
from lm.evaluation.text import BATCH_TOKENS, Scorer, losses
from lm.model import Llama

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class ProbeScore:
    """One cell of a heat map: mean over samples.

    Attributes:
        task: see lm.evaluation.long_context.
        length, depth: of the probes.
        samples: how many.
        exact_match: share answered to the letter.
        log_probability: of the answers, nats per byte.
    """

    task: str
    length: int
    depth: float
    samples: int
    exact_match: float
    log_probability: float


def filler_of(manifest: Manifest, tokenizer: Tokenizer, longest: int) -> list[str]:
    """Sentences of held-out text, enough from each source for probes of `longest` tokens."""
    texts: list[str] = []
    for source in manifest.source_names:
        left = 40 * longest  # characters: texts repeat sentences, and a token of markup can be many letters
        for text in documents(manifest, source, tokenizer, "validation"):
            texts.append(text[:left])
            left -= len(text)
            if left <= 0:
                break
    return sentences_of(texts)


Probes = dict[tuple[str, int, float], list[Question]]  # by task, length and depth


def make_probes(
    tokenizer: Tokenizer,
    filler: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int = 1,
    seed: int = 0,
) -> Probes:
    """Every task at every length and depth.

    Args:
        filler: sentences, see filler_of.
        samples: probes a cell.

    Raises:
        ConfigError: see make_probe.
    """
    found: Probes = {}
    for cell in product(tasks, sorted(lengths), DEPTHS):
        task, length, depth = cell
        probes = [make_probe(task, tokenizer, filler, length, depth, seed * 7919 + i) for i in range(samples)]
        found[cell] = [Question(probe.prompt, probe.answers) for probe in probes]
    return found


def run_probes(
    score: Scorer,
    write: Writer,
    tokenizer: Tokenizer,
    eot_id: int,
    probes: Probes,
    report: Callable[[ProbeScore], None] = lambda score: None,
) -> list[ProbeScore]:
    """Scores of each cell; `report` is called after each."""
    scores = []
    for (task, length, depth), questions in probes.items():
        rows = max(1, BATCH_TOKENS // length)
        found = ask(score, write, tokenizer, questions, eot_id, _ANSWER_TOKENS, rows)
        scores.append(ProbeScore(task, length, depth, len(questions), found.exact_match, found.per_byte))
        report(scores[-1])
    return scores


def accuracy_by_length(scores: Sequence[ProbeScore], task: str) -> dict[int, float]:
    """Exact match of a task, mean over depths."""
    found: dict[int, list[float]] = {}
    for score in scores:
        if score.task == task:
            found.setdefault(score.length, []).append(score.exact_match)
    return {length: float(np.mean(values)) for length, values in sorted(found.items())}


@dataclass(frozen=True)
class PositionLoss:
    """Loss over a range of positions.

    Attributes:
        first, last: positions, inclusive.
        loss: nats per token.
        tokens: how many.
    """

    first: int
    last: int
    loss: float
    tokens: int


def loss_by_position(
    model: Llama, manifest: Manifest, source: str, window: int, max_windows: int = 64, split: str = "validation"
) -> list[PositionLoss]:
    """Mean loss in ranges of position that double, over the beginnings of documents longer than a window.

    A model that uses its context has a loss that falls up to the last range. Empty where no document is that long.
    """
    rows = _long_documents(TokenStream(manifest, source, split), window + 1)[:max_windows]
    if not rows:
        return []
    total = np.zeros(window)
    for start in range(0, len(rows), max(1, BATCH_TOKENS // window)):
        tokens = torch.from_numpy(np.stack(rows[start : start + max(1, BATCH_TOKENS // window)]))
        total += losses(model, tokens[:, :-1], tokens[:, 1:]).sum(dim=0).numpy()
    edges = [0, *(1 << np.arange(window.bit_length() + 1)).tolist()]
    ranges = [(low, min(high, window)) for low, high in pairwise(edges) if low < window]
    return [
        PositionLoss(low, high - 1, float(total[low:high].sum() / (len(rows) * (high - low))), len(rows) * (high - low))
        for low, high in ranges
    ]


def _long_documents(stream: TokenStream, length: int) -> list[NDArray[np.int64]]:
    """The first `length` tokens of each document that has as many, end-of-text not counted."""
    found = []
    for before, ends in stream.shard_ends():
        starts = np.concatenate([[0], ends[:-1] + 1])
        for start in (starts[ends - starts >= length] + before).tolist():
            ids = np.empty(length, dtype=np.int64)
            stream.read_into(start, ids)
            found.append(ids)
    return found
