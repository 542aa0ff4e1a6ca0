"""Batches of packed windows from token streams; numpy and torch, no Lightning.

Window j of a source at sequence length T: inputs are tokens [jT, jT + T), labels the same shifted by one. An input
that is an end-of-text id has no label (-100), since what follows it is another document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.files import DataError
from lm.data.shards import Manifest
from lm.data.slices import base_of, stream_of

NO_LABEL = -100

Batch = dict[str, Any]


class WindowReader:
    """Reads windows of all sources of one split.

    Args:
        manifest: of the data folder.
        split: train or validation.
        sources: names in the order that source indices refer to; slices (lm.data.slices) after their sources.
    """

    def __init__(self, manifest: Manifest, split: str, sources: Sequence[str]) -> None:
        self.eot_id = manifest.eot_id
        self._folder, self._vocab_size = manifest.folder, manifest.vocab_size
        self._streams = [stream_of(manifest, name, split) for name in sources]
        bases = [base_of(name, manifest.source_names) for name in sources]
        self._base = np.array([sources.index(base) for base in bases], dtype=np.int64)

    def count_windows(self, source: int, sequence_length: int) -> int:
        """Whole windows of a source: (n_tokens - 1) // T."""
        return max(0, (self._streams[source].n_tokens - 1) // sequence_length)

    def count_labels(
        self, source: NDArray[np.int64], window: NDArray[np.int64], sequence_length: int
    ) -> NDArray[np.int64]:
        """Labelled tokens of each window, from document ends alone (no ids are read); int64 [len(window)]."""
        counts = np.full(len(window), sequence_length, dtype=np.int64)
        for index in np.unique(source):
            mask = source == index
            starts = window[mask] * sequence_length
            stream = self._streams[index]
            counts[mask] -= stream.ends_before(starts + sequence_length) - stream.ends_before(starts)
        return counts

    def batch(self, source: NDArray[np.int64], window: NDArray[np.int64], sequence_length: int) -> Batch:
        """Windows as tensors: input_ids, labels int64 [B, T]; document_ids int32 [B, T]; source int64 [B].

        `source` of a slice's window is the index of the source that the slice is part of.
        """
        tokens = np.empty((len(source), sequence_length + 1), dtype=np.int64)
        for row, index, number in zip(tokens, source.tolist(), window.tolist(), strict=True):
            self._streams[index].read_into(number * sequence_length, row)
        self._check_ids(tokens)
        # Copies: one row's slices are contiguous already, and would share memory with each other.
        inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        ends = inputs == self.eot_id
        labels[ends] = NO_LABEL
        document_ids = np.zeros(inputs.shape, dtype=np.int32)
        np.cumsum(ends[:, :-1], axis=1, dtype=np.int32, out=document_ids[:, 1:])
        return {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "document_ids": torch.from_numpy(document_ids),
            "source": torch.from_numpy(self._base[source]),
        }

    def _check_ids(self, ids: NDArray[np.int64]) -> None:
        if ids.size and ids.max() >= self._vocab_size:
            raise DataError(
                f"{self._folder} holds the id {ids.max()}, its vocabulary ends at {self._vocab_size - 1}: a shard is"
                f" damaged; find it with: python -m recipes.data verify --dir {self._folder}"
            )
