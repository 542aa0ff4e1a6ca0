"""Tokenizer: exact bytes in every script, special tokens in text, determinism."""

import json
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from lm.data.files import DataError
from lm.data.tokenizer import (
    END_OF_TEXT,
    byte_lengths,
    encode_documents,
    end_of_text_id,
    given_vocab_size,
    load_tokenizer,
    train_tokenizer,
)

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 30,
    "def f(x):\n    return x + 12345\n\n" * 20,
    "Straße, naïve, Ελληνικά, кириллица, 日本語, العربية, हिन्दी " * 10,
]
SCRIPTS = [
    "plain ascii",
    "日本語のテキスト、漢字",
    "العربية",
    "हिन्दी",
    "🤖🧪 emoji 👩‍👩‍👧",
    "tabs\tand\r\nlines\u2028and \u0085 odd ones\x00",
    f"a {END_OF_TEXT} b",
    "ﷺ é é (composed and not)",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 370)


def test_bytes_are_exact_and_text_comes_back(tokenizer) -> None:
    lengths = byte_lengths(tokenizer)
    for text, ids in zip(SCRIPTS, encode_documents(tokenizer, SCRIPTS), strict=True):
        assert lengths[ids].sum() == len(text.encode())
        assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_equal_logits_over_bytes_are_eight_bits_per_byte_in_any_script() -> None:
    """With no merges, a uniform choice among 256 bytes must be exactly 8.0 (U+FFFD counted as 3 bytes gives less)."""
    tokenizer = train_tokenizer(TEXTS, 257)
    lengths = byte_lengths(tokenizer)
    assert lengths[end_of_text_id(tokenizer)] == 0 and (np.delete(lengths, 0) == 1).all()
    for text, ids in zip(SCRIPTS, encode_documents(tokenizer, SCRIPTS), strict=True):
        nats = (len(ids) - 1) * math.log(256)
        assert nats / lengths[ids].sum() / math.log(2) == pytest.approx(8.0, abs=1e-12)
        assert lengths[ids].sum() == len(text.encode())


def test_special_token_in_text_is_plain_text(tokenizer) -> None:
    eot = end_of_text_id(tokenizer)
    for text in (END_OF_TEXT, f"x{END_OF_TEXT}y", f"{END_OF_TEXT}{END_OF_TEXT}"):
        ids = encode_documents(tokenizer, [text])[0]
        assert (ids == eot).sum() == 1 and ids[-1] == eot


def test_special_token_in_text_is_plain_text_after_a_reload(tokenizer, tmp_path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = encode_documents(load_tokenizer(tmp_path), [f"a{END_OF_TEXT}"])[0]
    assert (ids == 0).sum() == 1


def test_a_given_tokenizer_has_every_id_once(tokenizer, tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    content = json.loads(path.read_text())
    last = given_vocab_size(path) - 1
    vocab = content["model"]["vocab"]
    token = next(token for token, index in vocab.items() if index == last)
    for index in (last - 1, 70_000):
        path.write_text(json.dumps(content | {"model": content["model"] | {"vocab": vocab | {token: index}}}))
        with pytest.raises(DataError, match="leaves ids out, or gives one twice"):
            given_vocab_size(path)


def test_digits_are_single(tokenizer) -> None:
    tokens = tokenizer.encode("in 2024, 10000 x1").tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("2024100001")


def test_all_bytes_are_in_the_alphabet(tokenizer) -> None:
    singles = {token for token in tokenizer.get_vocab() if len(token) == 1}
    assert len(singles) == 256


def test_training_is_deterministic_across_processes(tmp_path) -> None:
    script = (
        "import sys, hashlib; sys.path.insert(0, '.');"
        "from lm.data.tokenizer import train_tokenizer;"
        "from tests.lm.test_data_tokenizer import TEXTS;"
        "print(hashlib.sha256(train_tokenizer(TEXTS, 370).to_str().encode()).hexdigest())"
    )
    digests = set()
    for threads, hash_seed in (("1", "1"), ("2", "2")):
        env = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1


def test_vocabulary_bounds() -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(TEXTS, 256)
    with pytest.raises(DataError, match="only enough distinct pairs for a vocabulary of"):
        train_tokenizer(["ab"], 300)


def test_long_runs_do_not_blow_up() -> None:
    """Without a splitting pre-tokenizer, one long line makes training take forever."""
    runs = "".join(character * 200_000 for character in "a=0 \n語")
    start = time.perf_counter()
    tokenizer = train_tokenizer([runs, *TEXTS], 300)
    ids = encode_documents(tokenizer, [runs])[0]
    assert time.perf_counter() - start < 20
    assert byte_lengths(tokenizer)[ids].sum() == len(runs.encode())
