"""What a sweep's cells were measured with, flat, so that two sweeps can be told apart by name of the setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sweeps.config import SweepConfig
from sweeps.grid import CELL_VERSION, Corpus

# What may differ between sweeps whose cells measure the same.
_FREE = ("name", "experiment", "budgets", "seeds", "resources", "runs_dir", "max_failures", "max_epochs", "data.dir")


def settings_of(config: SweepConfig, corpus: Corpus) -> dict[str, str]:
    """Every setting that cells share, by dotted name, as text; the corpus by its hashes."""
    plain = {**asdict(config), "corpus": dict(corpus.fingerprint), "version": CELL_VERSION}
    return {name: text for name, text in _flat("", plain) if not name.startswith(_FREE)}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """ "optim.lr was 0.008, is 0.004" of each setting that differs; "none" where one side has it not."""
    return [
        f"{name} was {before.get(name, 'none')}, is {now.get(name, 'none')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [
            pair for key, inner in value.items() for pair in _flat(f"{prefix}.{key}" if prefix else str(key), inner)
        ]
    return [(prefix, str(value)[:16] if prefix.startswith("corpus.") else str(value))]
