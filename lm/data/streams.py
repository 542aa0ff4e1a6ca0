"""Datasets that yield ready micro-batches: the training stream from any step, and fixed validation windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from lm.data.order import DataOrder
from lm.data.permute import key_of, permute
from lm.data.windows import NO_LABEL, Batch, WindowReader

# Samples whose place is computed at once: numpy's overhead a call is then spread over many steps of a small batch.
LOOKAHEAD_SAMPLES = 1024


@dataclass(frozen=True)
class Layout:
    """How a global batch is cut: world_size ranks, `accumulate` micro-batches a rank and step.

    Attributes:
        by_batch: the same for other global batches, by their tokens; for a plan with a batch ramp.
    """

    rank: int
    world_size: int
    accumulate: int
    by_batch: Mapping[int, int] = field(default_factory=dict)

    def micro_batches(self, batch_tokens: int) -> int:
        """Micro-batches a rank and step of a global batch."""
        return self.by_batch.get(batch_tokens, self.accumulate)


class TrainStream(IterableDataset[Batch]):
    """Endless micro-batches of one rank from `start_step` on.

    Step s takes the samples `order.step_samples(s)`; rank r the r-th equal part of them; micro-batch m the m-th equal
    part of that. With loader workers, worker w of n yields every n-th micro-batch, and the loader's round-robin puts
    them back in order.

    Attributes:
        start_step: 0-based optimizer step of the first micro-batch; set before iterating.
    """

    def __init__(self, order: DataOrder, reader: WindowReader, layout: Layout) -> None:
        self.order = order
        self.reader = reader
        self.layout = layout
        self.start_step = 0

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, n_workers = (0, 1) if info is None else (info.id, info.num_workers)
        step, first = self.start_step, 0
        while True:
            n_steps = self._steps_ahead(step)
            accumulate = self.layout.micro_batches(self.order.plan.ramp.batch(step))
            for micro_batch, batch in self._steps(step, n_steps, first, accumulate, worker, n_workers):
                assert micro_batch % n_workers == worker
                yield batch
            step, first = step + n_steps, first + n_steps * accumulate

    def _steps_ahead(self, step: int) -> int:
        plan = self.order.plan
        n_steps = max(1, LOOKAHEAD_SAMPLES // plan.samples_per_step(step))
        alike = plan.steps_alike(step)
        return n_steps if alike is None else min(n_steps, alike)

    def _steps(
        self, step: int, n_steps: int, first: int, accumulate: int, worker: int, n_workers: int
    ) -> Iterator[tuple[int, Batch]]:
        """Micro-batches of steps that are alike; `first` is the number of the first one."""
        layout, plan = self.layout, self.order.plan
        sequence_length = plan.stages[plan.stage_of_step(step)].sequence_length
        source, window = self.order.locate(self.order.step_samples(step, n_steps))
        labels = self.reader.count_labels(source, window, sequence_length).reshape(n_steps, -1).sum(axis=1)
        parts = (n_steps, layout.world_size, accumulate, -1)
        source, window = (array.reshape(parts)[:, layout.rank] for array in (source, window))
        for i in range((worker - first) % n_workers, n_steps * accumulate, n_workers):
            row, micro = divmod(i, accumulate)
            batch = self.reader.batch(source[row, micro], window[row, micro], sequence_length)
            # Mean over ranks and micro-batches of sum(nll) / loss_tokens = mean over the global batch's labels. At
            # least one label, so that a batch of nothing but document ends gives 0 and not NaN.
            batch["loss_tokens"] = max(float(labels[row]), 1.0) / (layout.world_size * accumulate)
            yield first + i, batch


def validation_windows(name: str, n_available: int, n_wanted: int, seed: int) -> NDArray[np.int64]:
    """Fixed choice of distinct windows over a whole validation split, sorted; all of them if there are no more."""
    count = min(n_wanted, n_available)
    chosen = permute(np.arange(count, dtype=np.int64), max(n_available, 1), key_of("validation", seed, name))
    return np.sort(chosen)


class ValidationWindows(IterableDataset[Batch]):
    """A rank's part of one source's validation windows; every rank yields the same number of equal-sized batches.

    Ranks take disjoint windows, the last batches are filled up with rows without labels (target_bytes 0), so sums over
    ranks count every window exactly once. Iterable, so that Lightning adds no sampler that repeats windows.
    """

    def __init__(
        self,
        reader: WindowReader,
        source: int,
        windows: NDArray[np.int64],
        sequence_length: int,
        batch_size: int,
        layout: Layout,
        byte_lengths: NDArray[np.int64],
    ) -> None:
        self.reader = reader
        self.source = source
        self.windows = windows[layout.rank :: layout.world_size]
        self.sequence_length = sequence_length
        most = -(-len(windows) // layout.world_size)
        self.batch_size = max(1, min(batch_size, most))
        self.n_batches = -(-most // self.batch_size)
        self.filler = windows[:1]
        # One more entry, so that the label -100 can look up 0 bytes.
        self._bytes = torch.from_numpy(np.append(byte_lengths, 0))

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.n_batches):
            windows = self.windows[number * self.batch_size : (number + 1) * self.batch_size]
            missing = self.batch_size - len(windows)
            padded = np.concatenate([windows, np.repeat(self.filler, missing)])
            source = np.full(len(padded), self.source, dtype=np.int64)
            batch = self.reader.batch(source, padded, self.sequence_length)
            batch["labels"][len(windows) :] = NO_LABEL
            labels = batch["labels"]
            ids = torch.where(labels == NO_LABEL, len(self._bytes) - 1, labels)
            batch["target_bytes"] = self._bytes[ids].sum(dim=1)
            yield batch
