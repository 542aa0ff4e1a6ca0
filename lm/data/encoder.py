"""Encoding many documents fast: a tokenizer with SPLIT_PATTERN encodes each distinct piece once.

A text is the ids of its pieces one after the other; text repeats its pieces, so their ids are remembered (a bounded
number of them). Ids are those of the tokenizer itself, whatever was encoded before.
"""

from __future__ import annotations

import hashlib
import json
import socket
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lm.data.documents import TextPart
from lm.data.files import DataError
from lm.data.own_split import cuts_nothing, own_segments
from lm.data.pieces import SEGMENT_CHARACTERS, odd_characters, piece_pattern, segments
from lm.data.tokenizer import (
    SPLIT_PATTERN,
    byte_lengths,
    encode_documents,
    end_of_text_id,
    pre_tokenizer,
    tokenizer_from,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REMEMBERED = 1 << 18  # pieces; about 50 MB


class _Numbers(dict[str, int]):
    """Piece -> its number, in the order of their first sight; `new` holds those seen since it was emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, piece: str) -> int:
        number = self[piece] = len(self)
        self.new.append(piece)
        return number


class Encoder:
    """Ids of documents.

    Attributes:
        fast: whether the tokenizer splits by SPLIT_PATTERN; any other is asked for every document.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.eot_id = tokenizer, end_of_text_id(tokenizer)
        self.fast = _splits_by_pattern(tokenizer)
        self._cuts = not self.fast and cuts_nothing(tokenizer)
        self._pattern = piece_pattern(SPLIT_PATTERN)
        self._forget()

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Ids of each text followed by end-of-text; uint32 arrays."""
        if not self.fast and max(map(len, texts), default=0) <= SEGMENT_CHARACTERS:
            return encode_documents(self.tokenizer, texts)
        return [self._document(text) for text in texts]

    def _document(self, text: str) -> NDArray[np.uint32]:
        end = np.array([self.eot_id], dtype=np.uint32)
        if self.fast:
            return np.concatenate([*map(self._segment, segments(text)), end])
        parts = own_segments(self.tokenizer, text) if self._cuts else [text]
        return np.concatenate([*(encode_documents(self.tokenizer, [part])[0][:-1] for part in parts), end])

    def _segment(self, text: str) -> NDArray[np.uint32]:
        if not text.isascii() and odd_characters().search(text):
            return encode_documents(self.tokenizer, [text])[0][:-1]
        pieces = self._pattern.findall(text)
        numbers = np.fromiter(map(self._numbers.__getitem__, pieces), np.int64, len(pieces))
        if self._numbers.new:
            self._learn()
        ids = self._ids_of(numbers)
        if len(self._numbers) > _REMEMBERED:
            self._forget()
        return ids

    def _ids_of(self, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        lengths = self._lengths[numbers]
        stops = np.cumsum(lengths)
        shift = self._starts[numbers] - stops + lengths
        return self._ids[np.repeat(shift, lengths) + np.arange(stops[-1] if len(stops) else 0)]

    def _learn(self) -> None:
        encodings = self.tokenizer.encode_batch_fast(self._numbers.new, add_special_tokens=False)
        for encoding in encodings:
            self._all_ids.extend(encoding.ids)
            self._all_lengths.append(len(encoding.ids))
        self._numbers.new = []
        self._ids = np.array(self._all_ids, dtype=np.uint32)
        self._lengths = np.array(self._all_lengths, dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._all_ids, self._all_lengths = array("I"), array("q")


def _splits_by_pattern(tokenizer: Tokenizer) -> bool:
    """Whether pieces of SPLIT_PATTERN are encoded each by itself, always to the same ids."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    ours = json.loads(pre_tokenizer().__getstate__())
    plain = content["normalizer"] is None and all(token["special"] for token in content["added_tokens"])
    return plain and content["pre_tokenizer"] == ours and not content["model"].get("dropout")


@dataclass(frozen=True)
class EncodedPart:
    """Documents as ids.

    Attributes:
        ids: of all of them, each ended by end-of-text; [tokens].
        lengths: tokens of each, end-of-text included; int64 [documents].
        sizes: UTF-8 bytes of each; int64 [documents].
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def until(self, tokens: int) -> tuple[EncodedPart, EncodedPart | None]:
        """The documents up to the one that reaches `tokens`, and the others, if any."""
        ends = np.cumsum(self.lengths)
        number = int(np.searchsorted(ends, tokens, side="left")) + 1
        if number >= len(self.lengths):
            return self, None
        cut = int(ends[number - 1])
        return (
            EncodedPart(self.ids[:cut], self.lengths[:number], self.sizes[:number]),
            EncodedPart(self.ids[cut:], self.lengths[number:], self.sizes[number:]),
        )


def encode_part(part: TextPart, path: Path, digest: str, dtype: np.dtype[Any]) -> EncodedPart:
    """A part's documents as ids; checked to stand for exactly as many bytes.

    Args:
        path: of tokenizer.json.
        digest: its sha256.
        dtype: of the ids.

    Raises:
        DataError: the tokenizer lost text, or is another one here.
    """
    encoder, id_bytes = _encoder(path, digest)
    sizes = part.sizes()
    documents = []
    for ids, size in zip(encoder.encode(list(part.texts())), sizes.tolist(), strict=True):
        found = int(id_bytes[ids].sum())
        if found != size or int((ids == encoder.eot_id).sum()) != 1:
            raise DataError(f"the tokenizer lost text: {size} bytes became {found}")
        documents.append(ids.astype(dtype))
    return EncodedPart(np.concatenate(documents), np.array([len(ids) for ids in documents]), sizes)


@lru_cache(maxsize=1)
def _encoder(path: Path, digest: str) -> tuple[Encoder, NDArray[np.int64]]:
    """Made once a worker."""
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != digest:
        raise DataError(f"{socket.gethostname()} has another tokenizer in {path} than the command that was started")
    tokenizer = tokenizer_from(text)
    return Encoder(tokenizer), byte_lengths(tokenizer)
