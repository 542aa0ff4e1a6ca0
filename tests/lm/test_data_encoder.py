"""Fast encoding gives the tokenizer's own ids: over all characters, any mix of them, long texts."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from lm.data import encoder as encoder_module
from lm.data import own_split, pieces
from lm.data.encoder import EncodedPart, Encoder
from lm.data.own_split import cuts_nothing, own_segments
from lm.data.pieces import odd_characters, piece_pattern, segments
from lm.data.tokenizer import SPLIT_PATTERN, encode_documents, load_tokenizer, pre_tokenizer, train_tokenizer
from tests.lm.test_data_tokenizer import SCRIPTS, TEXTS

COMMON = "aAzZéßſ'sStTreveLLmd 0123٣½²Ⅷ_-—.,;:!?\"“”()[]{}<>|/\\\t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2028\u3000\u200b"
COMMON += "日本。ーЖ中हि్த🤖𐄇\u0301"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS + SCRIPTS, 420)


def mixed(rng: random.Random, size: int) -> str:
    """Runs of one character beside random ones: the pattern's limits are at 64."""
    parts = []
    while len(parts) < size:
        run = rng.choice((1, 1, 1, 2, 3, 63, 64, 65, 130))
        parts.append(rng.choice(COMMON) * run if rng.random() < 0.5 else "".join(rng.choices(COMMON, k=run)))
    return "".join(parts)


def theirs(text: str) -> list[str]:
    return [text[start:stop] for _, (start, stop) in pre_tokenizer().pre_tokenize_str(text)]


def test_pieces_are_those_of_the_tokenizer() -> None:
    pattern = piece_pattern(SPLIT_PATTERN)
    rng = random.Random(0)
    for _ in range(300):
        text = mixed(rng, 12)
        text = odd_characters().sub("", text)
        assert pattern.findall(text) == theirs(text)


def test_every_character_is_seen_alike_or_known_as_odd() -> None:
    pattern, odd = piece_pattern(SPLIT_PATTERN), odd_characters()
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    kept = [character for character in every if not odd.match(character)]
    assert len(kept) > 200_000 and len(every) - len(kept) > 800_000 and not {"½", "²", "é", "日", "\x1c"} - set(kept)
    large = [(0x3400, 0xD7A4), (0xE000, 0xF900), (0x17000, 0x18D00), (0x20000, 0x40000)]  # mostly CJK: every 13th
    kept = [c for n, c in enumerate(kept) if n % 13 == 0 or not any(first <= ord(c) < last for first, last in large)]
    for start in range(0, len(kept), 20_000):
        text = "".join(f"a{character}1 {character}\n" for character in kept[start : start + 20_000])
        assert pattern.findall(text) == theirs(text)


def test_ids_are_the_tokenizers_own(tokenizer, monkeypatch) -> None:
    rng = random.Random(1)
    texts = [mixed(rng, 20) for _ in range(200)] + TEXTS + SCRIPTS + ["\U00050000 beyond", "x"]
    assert any(odd_characters().search(text) for text in texts)
    whole = encode_documents(tokenizer, texts)
    for remembered in (1 << 18, 5):  # the second forgets all the time
        monkeypatch.setattr(encoder_module, "_REMEMBERED", remembered)
        found = Encoder(tokenizer)
        assert found.fast
        for ids, expected in zip(found.encode(texts), whole, strict=True):
            assert np.array_equal(ids, expected) and ids.dtype == np.uint32


def test_segments_change_no_id(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(pieces, "SEGMENT_CHARACTERS", 50)
    rng = random.Random(2)
    for text in [mixed(rng, 200) for _ in range(20)] + [TEXTS[0], TEXTS[2], "日本語。" * 100]:
        parts = list(segments(text))
        assert "".join(parts) == text and len(parts) > 3
        (ids,) = Encoder(tokenizer).encode([text])
        assert np.array_equal(ids, encode_documents(tokenizer, [text])[0])
    assert list(segments("a" * 500)) == ["a" * 500]  # nowhere to cut
    assert list(segments("")) == [""]


def test_segments_train_the_same_tokenizer(monkeypatch) -> None:
    whole = train_tokenizer(TEXTS, 370).to_str()
    monkeypatch.setattr(pieces, "SEGMENT_CHARACTERS", 50)
    parts = [part for text in TEXTS for part in segments(text)]
    assert len(parts) > 20
    assert train_tokenizer(parts, 370).to_str() == whole


def test_another_tokenizer_is_asked_itself(tokenizer, tmp_path: Path) -> None:
    content = json.loads(tokenizer.to_str())
    llama = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    llama["Regex"] = re.sub(r"\\p\{N\}", r"\\p{N}{1,3}", SPLIT_PATTERN, count=2)
    (tmp_path / "other.json").write_text(json.dumps(content))
    other = load_tokenizer(tmp_path / "other.json")
    found = Encoder(other)
    assert not found.fast
    for ids, expected in zip(found.encode(SCRIPTS), encode_documents(other, SCRIPTS), strict=True):
        assert np.array_equal(ids, expected)


LLAMA3 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SPLITS: dict[str, list[Any]] = {
    "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "gpt2": [pre_tokenizers.ByteLevel(False)],
    "lines": [pre_tokenizers.Split(Regex(r"\w+\s*"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "none": [pre_tokenizers.ByteLevel(False, use_regex=False)],
    "prefix": [pre_tokenizers.ByteLevel(True)],
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_long_text_is_cut_where_another_split_has_an_end(tokenizer, monkeypatch, name: str) -> None:
    monkeypatch.setattr(own_split, "SEGMENT_CHARACTERS", 50)
    monkeypatch.setattr(encoder_module, "SEGMENT_CHARACTERS", 50)
    monkeypatch.setattr(own_split, "_AROUND", (40, 33))
    other = Tokenizer.from_str(tokenizer.to_str())
    other.encode_special_tokens = True
    other.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[name])
    found, rng, parts = Encoder(other), random.Random(3), 0
    assert not found.fast and cuts_nothing(other) == (name != "prefix")
    for text in [mixed(rng, 200) + " and more\nof it" * 9 for _ in range(30)]:
        (ids,) = found.encode([text])
        assert np.array_equal(ids, encode_documents(other, [text])[0])
        parts += len(list(own_segments(other, text)))
    # `lines` takes spaces to the word before them, `none` has one piece a text: no cut would do.
    assert parts > 60 if name in ("llama3", "gpt2", "prefix") else parts == 30


def test_a_part_is_cut_after_the_document_that_reaches_the_shard() -> None:
    part = EncodedPart(np.arange(12), np.array([3, 4, 5]), np.array([30, 40, 50]))
    for tokens, documents in ((1, 1), (3, 1), (4, 2), (7, 2), (8, 3), (12, 3), (99, 3)):
        now, rest = part.until(tokens)
        assert len(now.lengths) == documents and len(now.ids) == now.lengths.sum()
        assert (rest is None) == (documents == 3)
        if rest is not None:
            assert list(now.ids) + list(rest.ids) == list(range(12)) and list(rest.sizes) == [30, 40, 50][documents:]
