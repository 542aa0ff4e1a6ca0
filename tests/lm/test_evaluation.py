"""Measures of a finished model, without a model where that is possible."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.data.synthetic import write_folder
from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError
from lm.evaluation.contamination import check_contamination
from lm.evaluation.long_context import TASKS, EffectiveLength, effective_length, make_probe, sentences_of
from lm.evaluation.probes import loss_by_position
from lm.evaluation.questions import Answered, Question, QuestionScore, ask, normalise, read_questions
from lm.evaluation.text import TextScore, losses, read_documents, score_document, scorer
from lm.model import Llama

V = 300


def bytes_as_ids(text: str) -> np.ndarray:
    """The synthetic folder's tokenizer: no merge applies, id = what its vocabulary gives the byte."""
    return np.array([*_TOKENIZER.encode(text).ids, 0], dtype=np.uint32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    global _TOKENIZER
    path = tmp_path_factory.mktemp("data")
    write_folder(path, {"a": {"train": [np.array([5, 0])], "validation": [np.array([5, 0])]}}, V)
    _TOKENIZER = load_tokenizer(path)
    rng = random.Random(0)
    vocabulary = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "ru", "sy") for b in ("ban", "dor", "fen", "gul", "tas")]
    texts = [" ".join(rng.choices(vocabulary, k=60)) + "." for _ in range(30)]
    path = path / "full"
    documents = [bytes_as_ids(text) for text in texts]
    write_folder(path, {"a": {"train": documents[:25], "validation": documents[25:]}}, V, shard_tokens=2000)
    (path / "texts.json").write_text(json.dumps(texts))
    return path


def uniform_model() -> Llama:
    """Every token is equally likely: all weights of the head are 0."""
    config = ModelConfig(vocab_size=V, d_model=16, n_layers=1, n_heads=2, d_ff=16)
    model = Llama(config)
    assert model.head is not None
    torch.nn.init.zeros_(model.head.weight)
    return model


def test_bits_per_byte_where_perplexity_misleads() -> None:
    few = TextScore(nats=250 * math.log(18), tokens=250, n_bytes=1000)
    many = TextScore(nats=400 * math.log(12), tokens=400, n_bytes=1000)
    assert few.bits_per_byte == pytest.approx(1.042, abs=5e-4) and many.bits_per_byte == pytest.approx(1.434, abs=5e-4)
    assert many.perplexity < few.perplexity and many.bits_per_byte > few.bits_per_byte
    assert math.isnan(TextScore(0.0, 0, 0).loss) and TextScore(1e6, 1, 1).perplexity == math.inf


@pytest.mark.parametrize("length", [2, 8, 9, 12, 13, 40, 41])
@pytest.mark.parametrize("context", [0, 3, 7])
def test_every_token_but_the_first_is_scored_once(length: int, context: int) -> None:
    ids = np.arange(1, length + 1)
    found = score_document(scorer(uniform_model()), ids, np.full(V, 3, dtype=np.int64), window=8, context=context)
    assert (found.tokens, found.n_bytes) == (length - 1, 3 * (length - 1))
    assert found.loss == pytest.approx(math.log(V), rel=1e-6)


def test_context_is_what_a_label_has_before_it() -> None:
    """Windows of 8 that overlap by 6: a later one scores its last two labels only."""
    config = ModelConfig(vocab_size=V, d_model=16, n_layers=2, n_heads=2, d_ff=16, init_std=0.5)
    torch.manual_seed(0)
    model = Llama(config)
    ids = torch.randint(1, V, (15,))
    want = losses(model, ids[None, :8], ids[None, 1:9]).sum()
    for start in (2, 4, 6):
        want += losses(model, ids[None, start : start + 8], ids[None, start + 1 : start + 9])[0, 6:].sum()
    found = score_document(scorer(model), ids.numpy(), np.ones(V, dtype=np.int64), window=8, context=6)
    assert found.nats == pytest.approx(float(want), rel=1e-6)
    with pytest.raises(ConfigError, match="context must be from 0 to window - 1 = 7"):
        score_document(scorer(model), ids.numpy(), np.ones(V, dtype=np.int64), window=8, context=8)


def test_what_counts_as_the_same_answer() -> None:
    assert normalise("  The Café,\tof   a man!") == "café of man"
    assert normalise("ﬁve") == normalise("FIVE.") == "five"
    assert normalise("thea") == "thea" and normalise("1.5") == "15"
    # An answer of which nothing would be left: else a model that writes nothing is right.
    assert (normalise("A."), normalise("The"), normalise("..."), normalise(" ")) == ("a", "the", "...", "")


@pytest.mark.parametrize(
    ("written", "answers", "exact"),
    [
        ("\n b\nc\nd", ["x", "b\nc"], True),  # as many lines as the answer has, and no more
        ("b\nc\nd", ["b"], True),
        ("b\nd", ["b\nc"], False),
        ("b", ["b\nc"], False),
        ("c\nb", ["b"], False),
        ("", ["x"], False),
    ],
)
def test_an_answer_is_compared_over_its_own_lines(folder: Path, written: str, answers: list, exact: bool) -> None:
    tokenizer, model = load_tokenizer(folder), uniform_model()
    ids = [*tokenizer.encode(written).ids, 0, *tokenizer.encode("after the end").ids]
    score = ask(scorer(model), lambda prompts, _: [ids] * len(prompts), tokenizer, [Question("p", tuple(answers))], 0)
    assert score.exact_match == exact


def test_wilson_interval_of_the_exact_match() -> None:
    rows = tuple(Answered(Question("p", ("a",)), "a", i < 3, -1.0 - i, -0.5) for i in range(10))
    score = QuestionScore(rows)
    low, high = score.interval()
    assert score.exact_match == 0.3 and (low, high) == pytest.approx((0.10779, 0.60322), abs=1e-4)
    assert score.log_probability == pytest.approx(-5.5) and score.per_byte == -0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"answer": "a"}', "'prompt'"),
        ('{"prompt": "a", "answer": [" "]}', "'answer'"),
        ("[1]", "'prompt'"),
    ],
)
def test_a_bad_question_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "x", "answer": "y"}\n\n' + line)
    with pytest.raises(ConfigError, match=f"q.jsonl, line 3: .*{message}"):
        read_questions(path)


def test_documents_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = '{"text": "one\\u2028two"}\n \n{"text": "three"}\r\n'
    for mark in ("", "\ufeff"):
        path.write_text(mark + lines, encoding="utf-8")
        assert read_documents(path) == ["one\u2028two", "three"]
    (tmp_path / "b.txt").write_bytes(b"a\xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 1"):
        read_documents(tmp_path / "b.txt")


@pytest.mark.parametrize("task", TASKS)
def test_probes(folder: Path, task: str) -> None:
    tokenizer = load_tokenizer(folder)
    filler = sentences_of([" ".join(json.loads((folder / "texts.json").read_text()))])
    previous = -1
    for depth in (0.0, 0.5, 1.0):
        probe = make_probe(task, tokenizer, filler, 2048, depth, seed=1)
        assert probe == make_probe(task, tokenizer, filler, 2048, depth, seed=1)
        assert probe != make_probe(task, tokenizer, filler, 2048, depth, seed=2)
        assert 1200 < len(probe.ids) <= 2048 - len(probe.answers[0])
        first = probe.prompt.index({"variables": "Let", "frequent": "came in"}.get(task, "secret"))
        assert first >= previous and (probe.answers[0] in probe.prompt)
        previous = first
    if task == "frequent":
        counts = sorted(probe.prompt.count(f" {word} came in.") for word in set(probe.prompt.split()))
        assert counts[-1] == probe.prompt.count(f" {probe.answers[0]} came in.") == 3 and counts[-2] == 1
    with pytest.raises(ConfigError, match="too short for the task"):
        make_probe(task, tokenizer, filler, 40, 0.5, 0)
    with pytest.raises(ConfigError, match="filler text is too short"):
        make_probe(task, tokenizer, filler[:2], 8192, 0.5, 0)


def test_effective_length() -> None:
    assert effective_length({256: 1.0, 512: 0.9, 1024: 0.5, 2048: 0.9}) == EffectiveLength(512, 1024)
    assert effective_length({256: 0.5, 512: 0.5}) == EffectiveLength(512, None)
    assert effective_length({256: 0.0, 512: 0.5}) == EffectiveLength(None, None)


def test_contamination_of_short_long_and_shuffled_texts(folder: Path) -> None:
    texts = json.loads((folder / "texts.json").read_text())
    manifest = write_manifest(folder)
    words = texts[3].split()
    asked = [
        texts[3].upper(),
        " ".join(words[10:22]),
        " ".join(words[10:23]),
        " ".join(words[::-1]),
        texts[27],
        "a b c d",
    ]
    found = check_contamination(manifest, asked)
    shares = {overlap.index: overlap.share for overlap in found.found}
    assert found.too_short == 1 and shares == {0: 1.0, 1: 1.0, 2: 1.0}
    assert found.share == 3 / 5
    with pytest.raises(ConfigError, match="5 words or more"):
        check_contamination(manifest, asked, n=2)


def write_manifest(folder: Path):
    from lm.data.shards import load_manifest

    return load_manifest(folder)


def test_loss_by_position(folder: Path) -> None:
    rows = loss_by_position(uniform_model(), write_manifest(folder), "a", window=100)
    assert [(row.first, row.last) for row in rows] == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 31),
        (32, 63),
        (64, 99),
    ]
    assert all(row.loss == pytest.approx(math.log(V), rel=1e-6) for row in rows)
    assert sum(row.tokens for row in rows) == 5 * 100
    assert loss_by_position(uniform_model(), write_manifest(folder), "a", window=4000) == []


def test_the_worked_example_of_the_docs() -> None:
    """docs/evaluation.md: exact match jumps, the probability climbs evenly."""
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (0\.\d+) \| (0\.\d+) \| (-\d\.\d+) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 5
    for _, p, exact, log_probability in rows:
        assert f"{float(p) ** 10:.3f}" == exact and f"{10 * math.log(float(p)):.2f}" == log_probability
