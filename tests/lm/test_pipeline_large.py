"""A document of 100 MB beside an empty file: stages that compare or change texts get through, in bounded memory.

The hostile texts are what a pattern with nested repeats would go back and forth in; time must grow with their length.
"""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from lm.data.pipeline import near, substrings
from lm.data.pipeline.exact import single_spaced
from lm.data.pipeline.kinds import KINDS
from lm.data.pipeline.stage import Kept
from tests.lm.test_pipeline_near import store
from tests.lm.test_pipeline_quality import labelled  # noqa: F401, a fixture

STAGES = ("exact_documents", "exact_paragraphs", "near_duplicates", "repeated_substrings", "language", "pii")
HOSTILE = (
    "a",
    "1",
    "1.",
    "a:",
    "a@",
    "b-",
    "+1 (",
    "A",
    "AB12 ABCD",
    "\n",
    " ",
    ".\n\n",
    "漢字",
    "[1",
    "क\u0301",
    "a.b@c.",
)


def measured(stage: dict, kind: str, size: int) -> dict:
    command = [sys.executable, "-m", "tests.lm.large_document", json.dumps(stage), kind, str(size)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", STAGES)
def test_100_mb_in_one_document(kind: str) -> None:
    found = measured(
        {"kind": kind, **({"languages": ["en", "de"]} if kind == "language" else {})}, "prose", 100_000_000
    )
    report = found["report"]
    assert report["documents_in"] == 1 and report["bytes_in"] == 100_000_000
    assert found["peak"] < 1.5e9, found
    assert found["seconds"] < 300
    if kind == "pii":
        assert report["notes"]["email"] > 500_000
    elif kind != "language":  # what that says of invented words is its own affair
        assert report["documents_out"] == 1 and report["changed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_100_mb_get_a_quality_score(labelled) -> None:  # noqa: F811
    found = measured({"kind": "quality", **labelled, "threshold": 0.0}, "prose", 100_000_000)
    assert found["report"]["documents_out"] == 1 and found["peak"] < 1.5e9


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "most"), [("prose", 12), ("a b c d e f g h ", 24)])
def test_memory_of_a_shard(kind: str, most: float) -> None:
    """docs/pipeline.md: about 40 bytes a word."""
    size = 30_000_000
    found = measured({"kind": "repeated_substrings", "max_repeated_fraction": 1}, kind, size)
    small = measured({"kind": "repeated_substrings", "max_repeated_fraction": 1}, kind, size // 100)
    assert found["peak"] - small["peak"] < most * size


@pytest.mark.parametrize("kind", [stage for stage in STAGES if stage != "exact_documents"])
def test_time_grows_with_the_length_of_a_hostile_text(tmp_path, kind: str) -> None:
    stage = KINDS[kind]
    for text in HOSTILE:
        document = store(tmp_path, [(text * 60_000)[:60_000] + "x"])
        start = time.process_time()
        (outcome,) = stage.run(document, dict(stage.options))
        # Milliseconds where time is linear; 60,000 squared are minutes.
        assert time.process_time() - start < 5, (kind, text)
        if isinstance(outcome, Kept) and outcome.text is not None:
            assert outcome.text.decode()


def test_texts_that_are_read_in_parts_give_the_same(monkeypatch) -> None:
    rng = np.random.default_rng(0)
    pieces = ["word", "ß", "తెలుగు", "漢字", "İ", " ", "  ", "\n", "\u2028", "\x1c", "\x85", "\u00a0", "-", "12"]
    for _ in range(100):
        text = "".join(rng.choice(pieces, rng.integers(0, 60)))
        assert single_spaced(text, int(rng.integers(1, 20))) == " ".join(text.split())
        assert single_spaced(text.encode(), int(rng.integers(1, 20))) == b" ".join(text.encode().split())
        shingles, tokens = near.Shingles(3).of(text), substrings._TokenHashes().of(text)
        with monkeypatch.context() as patch:
            patch.setattr(near, "_LONG_CHARACTERS", 0)
            patch.setattr(substrings, "_LONG_CHARACTERS", 0)
            assert near.Shingles(3).of(text).tolist() == shingles.tolist()
            assert substrings._TokenHashes().of(text).tolist() == tokens.tolist()
