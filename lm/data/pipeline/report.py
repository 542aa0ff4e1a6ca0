"""What a stage did to a source's documents: counts, why documents fell, and some of them to look at."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from typing import Any

from lm.data.pipeline.stage import Dropped, Kept, Outcome
from lm.data.pipeline.store import Item

SAMPLES = 10
_SAMPLE_CHARACTERS = 400


class Samples:
    """At most 10 documents a rule, those with the smallest hashes: the same whatever the order and number of others."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
        self._number = 0

    def add(self, rule: str, item: Item, detail: str) -> None:
        """Offer a document."""
        rank = -int.from_bytes(hashlib.blake2b(item.text, digest_size=8).digest(), "little")
        heap = self._heaps.setdefault(rule, [])
        if len(heap) == SAMPLES and rank <= heap[0][0]:
            return
        self._number += 1
        text = " ".join(item.text[: 4 * _SAMPLE_CHARACTERS].decode("utf-8", "replace").split())[:_SAMPLE_CHARACTERS]
        entry = (rank, -self._number, {"detail": detail, "url": item.url, "bytes": len(item.text), "text": text})
        (heapq.heappush if len(heap) < SAMPLES else heapq.heapreplace)(heap, entry)

    def plain(self) -> dict[str, list[dict[str, Any]]]:
        """Samples by rule."""
        return {rule: [entry[2] for entry in sorted(heap, reverse=True)] for rule, heap in sorted(self._heaps.items())}


class StageReport:
    """Counts of one stage; `plain` is what funnel.json holds."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.counts = dict.fromkeys(("documents_in", "bytes_in", "documents_out", "bytes_out", "changed"), 0)
        self.dropped: dict[str, list[int]] = {}
        self.notes: Counter[str] = Counter()
        self.samples = Samples()

    def count(self, item: Item, outcome: Outcome) -> None:
        """Add one document."""
        self.counts["documents_in"] += 1
        self.counts["bytes_in"] += len(item.text)
        if isinstance(outcome, Dropped):
            self.drop(item, outcome)
        else:
            self.keep(item, outcome)

    def drop(self, item: Item, outcome: Dropped) -> None:
        """A document that goes, counted as read already."""
        row = self.dropped.setdefault(outcome.reason, [0, 0])
        row[0] += 1
        row[1] += len(item.text)
        self.samples.add(outcome.reason, item, outcome.detail)

    def keep(self, item: Item, outcome: Kept) -> None:
        """A document that stays, counted as read already."""
        text = item.text if outcome.text is None else outcome.text
        self.counts["documents_out"] += 1
        self.counts["bytes_out"] += len(text)
        self.counts["changed"] += text != item.text
        self.notes.update(outcome.notes)
        for name in outcome.notes:
            self.samples.add(name, Item(text, item.url), outcome.detail)  # as it stays: without what pii took

    def plain(self) -> dict[str, Any]:
        """As plain values; the most frequent reason first."""
        rows = sorted(self.dropped.items(), key=lambda row: (-row[1][0], row[0]))
        return {
            "stage": self.stage,
            **self.counts,
            "dropped": {reason: {"documents": n, "bytes": size} for reason, (n, size) in rows},
            "notes": dict(sorted(self.notes.items())),
            "samples": self.samples.plain(),
        }
