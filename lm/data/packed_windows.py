"""Batches of windows made by best-fit packing, with the interface of lm.data.windows.

A window is whole documents and pieces of documents that are longer than it, then padding. Each piece has its own
document id, so attention and positions start anew; the label of an input is the next id of its document, also where
that lies in another window. End-of-text and padding have none. Padding is end-of-text ids under a document id of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.packing import PackedStream
from lm.data.shards import Manifest
from lm.data.windows import NO_LABEL, Batch, WindowReader

Int64Array = NDArray[np.int64]


class PackedReader(WindowReader):
    """Reads packed windows of all sources of one split; opens a source's index at the first window it reads of it.

    Args:
        manifest: of the data folder.
        split: train or validation.
        sources: names in the order that source indices refer to; slices (lm.data.slices) after their sources.
    """

    def __init__(self, manifest: Manifest, split: str, sources: Sequence[str]) -> None:
        super().__init__(manifest, split, sources)
        self._manifest, self._split, self._names = manifest, split, tuple(sources)
        self._packed: dict[tuple[int, int], PackedStream] = {}

    def _stream(self, source: int, sequence_length: int) -> PackedStream:
        key = source, sequence_length
        if key not in self._packed:
            self._packed[key] = PackedStream(self._manifest, self._names[source], self._split, sequence_length)
        return self._packed[key]

    def count_windows(self, source: int, sequence_length: int) -> int:
        """Windows of a source; all of its tokens are in them."""
        return self._stream(source, sequence_length).counts.windows

    def count_labels(self, source: Int64Array, window: Int64Array, sequence_length: int) -> Int64Array:
        """Labelled tokens of each window, from the index alone; int64 [len(window)]."""
        counts = np.empty(len(window), dtype=np.int64)
        for index in np.unique(source).tolist():
            mask = source == index
            counts[mask] = self._stream(index, sequence_length).labels(window[mask])
        return counts

    def batch(self, source: Int64Array, window: Int64Array, sequence_length: int) -> Batch:
        """As of WindowReader, and `padding`: positions of the batch that hold no token."""
        inputs = np.full((len(source), sequence_length), self.eot_id, dtype=np.int64)
        documents = np.empty(inputs.shape, dtype=np.int32)
        # Row, column, id: the label of the last input of a piece whose document goes on elsewhere.
        following: list[tuple[int, int, int]] = []
        padding = 0
        for row, (index, number) in enumerate(zip(source.tolist(), window.tolist(), strict=True)):
            stream = self._stream(index, sequence_length)
            end = 0
            for document, (start, length) in enumerate(stream.pieces(number)):
                begin, end = end, end + length
                stream.read_into(start, inputs[row, begin:end])
                documents[row, begin:end] = document
                if inputs[row, end - 1] != self.eot_id:
                    after = np.empty(1, dtype=np.int64)
                    stream.read_into(start + length, after)
                    following.append((row, end - 1, int(after[0])))
            documents[row, end:] = document + 1
            padding += sequence_length - end
        labels = np.full_like(inputs, NO_LABEL)
        labels[:, :-1] = inputs[:, 1:]
        labels[inputs == self.eot_id] = NO_LABEL
        for row, column, label in following:
            labels[row, column] = label
        self._check_ids(inputs)
        self._check_ids(labels)
        return {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "document_ids": torch.from_numpy(documents),
            "source": torch.from_numpy(self._base[source]),
            "padding": padding,
        }


def reader_of(packing: str, manifest: Manifest, split: str, sources: Sequence[str]) -> WindowReader:
    """The reader of a plan's windows."""
    kind = PackedReader if packing == "best_fit" else WindowReader
    return kind(manifest, split, sources)
