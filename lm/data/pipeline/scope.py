"""Which documents a stage compares: all that it sees, of one source or of several, or those of one snapshot.

FineWeb (arXiv 2406.17557, section 3.4) looks for near-duplicates within each snapshot of a crawl: what recurs from
snapshot to snapshot was the better part there, and dedup over all of them kept the worse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.files import DataError
from lm.data.pipeline.parts import stage_outcomes
from lm.data.pipeline.stage import SNAPSHOT, Outcome
from lm.data.pipeline.store import Documents, Part

MOST_SNAPSHOTS = 256  # each is read by a pass of its own, with two open files


class Joined(Documents):
    """Documents of several stores, one after the other."""

    def __init__(self, stores: Sequence[Documents]) -> None:
        self.stores, self.executor = stores, stores[0].executor

    def __len__(self) -> int:
        return sum(map(len, self.stores))

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each document; int64 [documents]."""
        return np.concatenate([np.empty(0, np.int64), *(store.sizes() for store in self.stores)])

    def parts(self) -> Iterator[Part]:
        """Parts of each store in turn."""
        return chain.from_iterable(store.parts() for store in self.stores)


def outcomes(name: str, options: dict[str, Any], scope: str | None, stores: Sequence[Documents]) -> Iterator[Outcome]:
    """One outcome a document of all stores, in order.

    Args:
        name: kind of the stage.
        scope: SNAPSHOT: each snapshot's documents, those of all stores, are a run of the stage of their own.

    Raises:
        DataError: as the stage, or too many snapshots.
    """
    if scope != SNAPSHOT:
        return stage_outcomes(name, stores[0] if len(stores) == 1 else Joined(stores), options)
    return _by_snapshot(name, options, stores)


def _by_snapshot(name: str, options: dict[str, Any], stores: Sequence[Documents]) -> Iterator[Outcome]:
    labels = [store.snapshots() for store in stores]
    members: dict[str | None, list[Documents]] = defaultdict(list)
    for store, own in zip(stores, labels, strict=True):
        places: dict[str | None, list[int]] = defaultdict(list)
        for place, label in enumerate(own):
            places[label].append(place)
        for label, chosen in places.items():
            members[label].append(store.subset(np.array(chosen, dtype=np.int64)))
    if len(members) > MOST_SNAPSHOTS:
        raise DataError(
            f"{len(members):,} snapshots are more than the {MOST_SNAPSHOTS} that a stage of scope snapshot takes;"
            " name a coarser column or pattern in the option snapshot or snapshot_path"
        )
    runs = {label: stage_outcomes(name, Joined(documents), options) for label, documents in members.items()}
    for label in chain.from_iterable(labels):
        yield next(runs[label])
