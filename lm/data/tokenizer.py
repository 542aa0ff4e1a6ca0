"""Byte-level BPE by `tokenizers`: any text in, the same bytes out, one end-of-text id that no text can spell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lm.data.files import DataError, sha256_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from lm.data.shards import Manifest

END_OF_TEXT = "<|endoftext|>"
N_BYTES = 256
MIN_VOCAB_SIZE = N_BYTES + 1

# Words with one leading space or mark, single digits, runs of marks, line ends, spaces: Llama 3's pattern with digits
# one by one and no run above 64 characters. Splitting bounds what BPE training counts (without it, memory grows to
# 100 GB), and the cost of a piece grows faster than its length: a line of 200,000 equal signs took a minute.
SPLIT_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}{1,64}",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,64}",
        r"\s{0,64}[\r\n]{1,64}",
        r"\s{1,64}(?!\S)",
        r"\s{1,64}",
    ]
)


def pre_tokenizer() -> PreTokenizer:
    """Text -> pieces of SPLIT_PATTERN, spelled with one character a byte."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on texts; the same texts in the same order give the same tokenizer.

    Args:
        texts: of the train split only.
        vocab_size: ids in all: end-of-text (id 0), 256 bytes, merges.

    Raises:
        DataError: vocab_size is below 257, or the texts have too few pairs to reach it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"tokenizer.vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and end-of-text), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # Sorted: the list comes from a hash set, and ids follow its order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise DataError(
            f"the text has only enough distinct pairs for a vocabulary of {found}, not {vocab_size};"
            f" set tokenizer.vocab_size to {found} or add text"
        )
    return _plain(tokenizer)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Tokenizer of a data folder (or its tokenizer.json) that encodes special tokens in text as plain text.

    Raises:
        DataError: the file is missing or unreadable.
    """
    from tokenizers import Tokenizer

    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"{path} does not exist; run python -m recipes.data prepare first")
    try:
        return _plain(Tokenizer.from_file(str(path)))
    except Exception as error:
        raise DataError(f"{path} is not a tokenizer: {str(error).splitlines()[0]}") from None


def tokenizer_of(manifest: Manifest) -> Tokenizer:
    """The tokenizer that a data folder's shards were made with.

    Raises:
        DataError: the file is missing or another one.
    """
    path = manifest.folder / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    if sha256_file(path) != manifest.content["tokenizer_sha256"]:
        raise DataError(f"{path} is not what was prepared (another sha256); put it back or prepare it with --overwrite")
    return tokenizer


def given_vocab_size(path: Path) -> int:
    """Ids of a tokenizer.json that somebody else made, after a look at whether shards can be made with it.

    Raises:
        DataError: no such file, no end-of-text token, ids with gaps, or it does not give back the bytes of a text of
            many scripts.
    """
    tokenizer = load_tokenizer(path)
    end_of_text_id(tokenizer)
    known = sorted(tokenizer.get_vocab().values())
    if known != list(range(len(known))):
        raise DataError(
            f"{path} leaves ids out, or gives one twice ({len(known)} tokens, ids up to {known[-1]}); mend it"
        )
    lengths = byte_lengths(tokenizer)
    text = "The  naïve 東京 తెలుగు\t\u2028\r\n 123 \U0001f600" + END_OF_TEXT
    for probe in (f" {text}", text):  # some add a space where none leads, or take away one that does
        ids = encode_documents(tokenizer, [probe])[0]
        if int(ids.max()) >= len(lengths) or tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) != probe:
            raise DataError(f"{path} does not give back every text (no plain byte-level tokenizer); train one instead")
        if int(lengths[ids].sum()) != len(probe.encode()):
            raise DataError(f"{path} is not byte-level (its tokens do not spell bytes); train one instead")
    return tokenizer.get_vocab_size()


def tokenizer_from(text: bytes) -> Tokenizer:
    """The tokenizer of a tokenizer.json that was read and checked before."""
    from tokenizers import Tokenizer

    return _plain(Tokenizer.from_buffer(text))


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    # Not part of tokenizer.json: without it "<|endoftext|>" inside a text becomes the end-of-text id.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # a given one may be set to the length of its model
    tokenizer.no_padding()
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of end-of-text.

    Raises:
        DataError: the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(END_OF_TEXT)
    if found is None:
        raise DataError(f"the tokenizer has no {END_OF_TEXT} token")
    return int(found)


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[Any]]:
    """Ids of each text followed by end-of-text; uint32 arrays."""
    eot = end_of_text_id(tokenizer)
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([*encoding.ids, eot], dtype=np.uint32) for encoding in encodings]


def byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """UTF-8 bytes that each id stands for; int64 [vocab_size], end-of-text 0.

    A byte-level token is spelled with one character a byte, so its length is exact in any script, also where one
    character is split over several tokens (counting bytes of the decoded token would count U+FFFD instead).
    """
    lengths = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = len(token)
    lengths[end_of_text_id(tokenizer)] = 0
    return lengths
