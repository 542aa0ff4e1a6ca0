"""Repeated substrings against a search of all runs: what is cut occurs earlier, nothing that does is left."""

import numpy as np
import pytest

from lm.data.pipeline.kinds import KINDS
from lm.data.pipeline.stage import Dropped, Kept, Outcome
from lm.data.pipeline.substrings import repeated, without
from lm.data.words import word_pattern
from tests.lm.test_pipeline_near import store

KIND = KINDS["repeated_substrings"]


def reference(sequences: list[list[int]], n: int) -> list[list[bool]]:
    """The rule as docs/pipeline.md has it, run by run: first occurrences in a dictionary of all runs seen."""
    first: dict[tuple[int, ...], tuple[int, int]] = {}
    cut = [[False] * len(sequence) for sequence in sequences]
    for document, sequence in enumerate(sequences):
        for start in range(len(sequence) - n + 1):
            run = tuple(sequence[start : start + n])
            where, origin = first.setdefault(run, (document, start))
            if (where, origin) == (document, start):
                continue
            begin = max(start, origin + n) if where == document else start
            for place in range(begin, start + n):
                cut[document][place] = True
    return cut


def random_sequences(rng: np.random.Generator, n: int) -> list[list[int]]:
    """Documents over a small alphabet, with pieces of earlier ones, loops and repeats of themselves."""
    sequences: list[list[int]] = []
    for _ in range(rng.integers(0, 8)):
        sequence = rng.integers(0, rng.choice([2, 5, 1000]), rng.integers(0, 60)).tolist()
        for _ in range(rng.integers(0, 3)):
            source = sequences[rng.integers(len(sequences))] if sequences and rng.random() < 0.7 else sequence
            start = int(rng.integers(0, len(source) + 1))
            place = int(rng.integers(0, len(sequence) + 1))
            sequence[place:place] = source[start : start + int(rng.integers(0, 4 * n))] * int(rng.integers(1, 4))
        sequences.append(sequence)
    return sequences


def test_random_sequences_against_the_reference() -> None:
    rng = np.random.default_rng(0)
    cut_tokens = 0
    for _ in range(400):
        n = int(rng.integers(2, 12))
        sequences = random_sequences(rng, n)
        found = [mask.tolist() for mask in repeated([np.array(one, np.int64) for one in sequences], n)]
        assert found == reference(sequences, n)
        cut_tokens += sum(map(sum, found))
        check_what_is_cut_and_what_is_left(sequences, found, n)
    assert cut_tokens > 5000


def check_what_is_cut_and_what_is_left(sequences: list[list[int]], cut: list[list[bool]], n: int) -> None:
    """Each cut token lies in a run of n that occurs earlier; no run of n that is left whole does."""
    seen: set[tuple[int, ...]] = set()
    for sequence, gone in zip(sequences, cut, strict=True):
        justified = [False] * len(sequence)
        for start in range(len(sequence) - n + 1):
            run = tuple(sequence[start : start + n])
            if run in seen:
                assert any(gone[start : start + n])
                justified[start : start + n] = [True] * n
            seen.add(run)
        assert all(why for why, one in zip(justified, gone, strict=True) if one)


def words(start: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


def run(folder, texts: list[str], **options) -> list[Outcome]:
    return list(KIND.run(store(folder, texts), {**KIND.options, **options}))


def test_fifty_words_are_cut_and_forty_nine_stay(tmp_path) -> None:
    texts = [
        words(0, 200),
        f"Own start. {words(20, 49)}; own end.",
        f"Another opening: {words(20, 50).upper().replace(' ', ', ')}. Another end.\n",
        f"{words(500, 60)}\n\n{words(30, 60)}.\n\nLast one.",
        "unlike all others",
    ]
    outcomes = run(tmp_path, texts, max_repeated_fraction=0.93)
    assert outcomes[:2] == [Kept(), Kept()] and outcomes[4] == Kept()
    assert outcomes[2].text == b"Another opening: Another end.\n"
    assert outcomes[3] == Kept(
        f"{words(500, 60)}\n\n\n\nLast one.".encode(),
        {"repeated runs cut": 1, "repeated words cut": 60},
        "60 of 122 words",
    )


def test_a_document_that_is_mostly_repeated_goes(tmp_path) -> None:
    texts = [words(0, 100), words(0, 100), words(0, 60) + " " + words(900, 40)]
    first, second, third = run(tmp_path, texts)
    assert first == Kept()
    assert second == Dropped("mostly repeated substrings", "100 of 100 words occur earlier")
    assert third.text == words(900, 40).encode()
    outcomes = run(tmp_path, texts, action="drop", max_repeated_fraction=0.5)
    assert [isinstance(outcome, Dropped) for outcome in outcomes] == [False, True, True]
    outcomes = run(tmp_path, texts, action="drop", max_repeated_fraction=0.7)
    assert outcomes[2] == Kept()


def test_what_repeats_itself_at_once_keeps_its_first_words(tmp_path) -> None:
    (outcome,) = run(tmp_path, ["ha " * 500 + "end"], max_repeated_fraction=1)
    assert outcome.text == b"ha " * 50 + b"end"


@pytest.mark.parametrize("seed", range(3))
def test_text_without_its_cut_words_has_the_words_that_are_left(seed: int) -> None:
    """In any script, with any marks between: no word is torn and no two become one."""
    rng = np.random.default_rng(seed)
    alphabet = [
        "word",
        "Straße",
        "x_y",
        "İstanbul",
        "తెలుగు",
        "भाषा",
        "漢",
        "字",
        "ไทย",
        "かな",
        "n1",
        "O’Neil",
        "e\u0301t",
    ]
    gaps = [" ", ", ", "\n", "\n\n", ".\u2028", "", " (", "-"]
    for _ in range(200):
        text = "".join(rng.choice(alphabet) + rng.choice(gaps) for _ in range(rng.integers(0, 30)))
        tokens = word_pattern(text).findall(text)
        cut = rng.random(len(tokens)) < rng.choice([0.1, 0.5, 0.9])
        left, runs = without(text, cut)
        assert word_pattern(text).findall(left) == [token for token, gone in zip(tokens, cut, strict=True) if not gone]
        assert runs == np.count_nonzero(np.diff(cut.astype(int), prepend=0) == 1)
        if not cut.any():
            assert left == text


def test_scripts_without_spaces_count_letters(tmp_path) -> None:
    chinese = "".join(chr(0x4E00 + i) for i in range(80))
    first, second = run(tmp_path, [chinese + "。", "前" + chinese[10:70] + "後"], max_repeated_fraction=1)
    assert first == Kept() and second.text.decode() == "前 後"


def test_shards_are_searched_one_by_one_and_the_funnel_says_so(tmp_path) -> None:
    text = words(0, 60)
    size = len(text)
    outcomes = run(tmp_path, [text, text, text.replace("w", "v"), text], shard_bytes=2 * size + 10)
    assert isinstance(outcomes[1], Dropped)
    note = {"searched apart from the documents before (shard_bytes)": 1}
    assert outcomes[2:] == [Kept(notes=note), Kept()]  # the fourth repeats the first: of another shard
    (long,) = run(tmp_path, [f"{text} {text}"], shard_bytes=size + 1)  # a document longer than a shard, in two parts
    assert long == Kept(notes=note)
    assert isinstance(run(tmp_path, [f"{text} {text}"], max_repeated_fraction=0.4)[0], Dropped)


def test_odd_documents_and_options(tmp_path) -> None:
    assert run(tmp_path / "none", []) == []
    odd = ["", "!!! ???", "one", "a" * 100_000, "…" * 200]
    assert run(tmp_path, odd * 2) == [Kept()] * 10
