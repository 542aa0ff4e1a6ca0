"""A stage that looks at one document at a time, over a part of the documents, on whichever worker."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

from lm.data.files import DataError, sha256_json
from lm.data.pipeline.kinds import KINDS
from lm.data.pipeline.stage import Outcome, PerDocument, StageKind
from lm.data.pipeline.store import Documents, Item, Part


def stage_outcomes(name: str, documents: Documents, options: dict[str, Any]) -> Iterator[Outcome]:
    """One outcome a document, in order; in parts where the kind looks at one document at a time."""
    kind = KINDS[name]
    if not isinstance(kind.run, PerDocument):
        return kind.run(documents, options)
    parts = documents.gather(part_outcomes, name, json.dumps(options), _key(kind, options))
    return chain.from_iterable(parts)


def part_outcomes(part: Part, name: str, options: str, key: str) -> list[Outcome]:
    """Outcomes of a part's documents.

    Args:
        options: JSON.
        key: what decides the outcome where the stage was started.

    Raises:
        DataError: here it is something else (another version of a package, another file).
    """
    rule = _rule(name, options, key)
    return [rule(item) for item in part]


@lru_cache(maxsize=2)
def _rule(name: str, options: str, key: str) -> Callable[[Item], Outcome]:
    """Made once a worker: it may have to read a model or evaluation sets."""
    kind, values = KINDS[name], json.loads(options)
    if _key(kind, values) != key:
        raise DataError(
            f"stage {name}: {socket.gethostname()} has other files, other code or another version of"
            f" {', '.join(kind.packages) or 'Python'} than the machine that the command runs on; make them the same"
        )
    assert isinstance(kind.run, PerDocument)
    return kind.run.rule(values)


def _key(kind: StageKind, options: dict[str, Any]) -> str:
    return sha256_json(kind.key(options))
