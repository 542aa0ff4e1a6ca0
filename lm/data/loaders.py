"""DataLoaders over the streams of lm.data.streams, and which validation windows there are."""

from __future__ import annotations

import atexit
import multiprocessing.util  # first: hooks of exit run last come, first served, and ours is to be before its own
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lm.data.shards import Manifest
from lm.data.streams import Layout, TrainStream, ValidationWindows, validation_windows
from lm.data.tokenizer import byte_lengths, tokenizer_of
from lm.data.windows import Batch, WindowReader
from lm.errors import ConfigError

# Validation keeps no gradients, so it can take more than a small training micro-batch.
VALIDATION_BATCH_TOKENS = 8192


def identity(batch: Batch) -> Batch:
    """Collate function of batches that are ready."""
    return batch


def outlive_signals(worker: int) -> None:
    """In a loader worker: what asks a job to stop reaches all its processes, and the trainer still needs its batches.

    A worker ends when its trainer tells it to, or is gone.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Those of an iterator that outlives the script: multiprocessing would ask with SIGTERM, and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise over their end
    for worker in workers:
        worker.kill()


class StreamLoader(DataLoader[Batch]):
    """DataLoader over a TrainStream that asks for the position each time it is iterated."""

    def __init__(
        self,
        stream: TrainStream,
        position: Callable[[], int],
        before_fetch: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stream, **options)
        self.stream = stream
        self.position = position
        self.before_fetch = before_fetch

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self.stream.start_step = self.position()
        batches: Iterator[Batch] = super().__iter__()
        return batches if self.before_fetch is None else _fetched(batches, self.before_fetch)


def _fetched(batches: Iterator[Batch], before_fetch: Callable[[], None]) -> Iterator[Batch]:
    while True:
        before_fetch()
        yield next(batches)


class ValidationLoaders:
    """Makes one loader a source, at a sequence length.

    Args:
        manifest: of the data folder.
        layout: of the ranks.
        options: of every DataLoader.
    """

    def __init__(self, manifest: Manifest, layout: Layout, options: dict[str, Any]) -> None:
        self.manifest = manifest
        self.layout = layout
        self.options = options
        self._reader = WindowReader(manifest, "validation", manifest.source_names)
        self._bytes = byte_lengths(tokenizer_of(manifest))

    def long_enough(self, sequence_length: int) -> list[str]:
        """Sources whose validation split holds a window of this length."""
        names = self.manifest.source_names
        return [name for i, name in enumerate(names) if self._reader.count_windows(i, sequence_length) > 0]

    def at_lengths(
        self, sequence_length: int, longest: int, n_windows: int, batch_size: int
    ) -> tuple[list[tuple[str, str]], list[DataLoader[Batch]]]:
        """One loader a source, and, where `longest` is longer, one for each source that holds a window of it out.

        Args:
            n_windows: at most, of `sequence_length` tokens; as many tokens at `longest`.
            batch_size: of windows of `sequence_length` tokens.

        Returns:
            ((suffix of metric names: empty or _long, source) of each loader, the loaders).
        """
        names = list(self.manifest.source_names)
        sets = [("", name) for name in names]
        loaders = [self.make(name, sequence_length, n_windows, batch_size) for name in names]
        if longest > sequence_length:
            names = self.long_enough(longest)
            n_windows, batch_size = (max(1, n * sequence_length // longest) for n in (n_windows, batch_size))
            sets += [("_long", name) for name in names]
            loaders += [self.make(name, longest, n_windows, batch_size) for name in names]
            if not names and self.layout.rank == 0:
                warnings.warn(f"no source holds {longest} tokens out: there will be no val_loss_long", stacklevel=2)
        return sets, loaders

    def make(self, name: str, sequence_length: int, n_windows: int, batch_size: int) -> DataLoader[Batch]:
        """Batches of at most n_windows fixed windows of one source.

        Args:
            batch_size: windows a rank and batch, at most.

        Raises:
            ConfigError: the split is shorter than one window.
        """
        index = self.manifest.source_names.index(name)
        available = self._reader.count_windows(index, sequence_length)
        if available < 1:
            raise ConfigError(
                f"sequence_length {sequence_length} is longer than the validation split of source '{name}'"
                f" ({self.manifest.tokens('validation')[name]} tokens); shorten it or hold out more"
            )
        # Not by the run's seed: runs that differ in it are compared on the same windows.
        windows = validation_windows(name, available, n_windows, seed=0)
        part = ValidationWindows(self._reader, index, windows, sequence_length, batch_size, self.layout, self._bytes)
        return DataLoader(part, **self.options)
