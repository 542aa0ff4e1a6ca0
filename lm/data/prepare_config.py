"""What to prepare, and the values that decide the bytes of what comes out."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.data.files import DataError, sha256_file
from lm.data.pipeline.kinds import stage_keys
from lm.data.pipeline.stage import SNAPSHOT, StageSpec
from lm.data.shards import FORMAT_VERSION
from lm.data.sources import SNAPSHOT_OPTIONS, SourceSpec, kind_of
from lm.data.tokenizer import SPLIT_PATTERN

EXECUTORS = ("local", "ray")
MOST_WORKERS = 1024  # each is a process


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare.

    Attributes:
        sources: in the order of their indices; a text found in two counts for the earlier.
        vocab_size: of the tokenizer, 257 to 200,000; with a given one, its own.
        tokenizer_sample_bytes: most text the tokenizer is trained on, taken evenly from all train splits.
        validation_fraction: share of documents (or groups) held out.
        shard_tokens: a shard is closed after the document that reaches it.
        tokenizer_file: a given byte-level tokenizer.json, taken as it is; None: train one.
        stages: over the documents of all sources, in the order of `sources`, after each source's own stages.
        executor: local or ray: where parts run. Like workers it changes no byte of what comes out.
        workers: processes (local), or cores of a Ray of this machine's own.
    """

    sources: tuple[SourceSpec, ...]
    vocab_size: int
    tokenizer_sample_bytes: int = 64 << 20
    validation_fraction: float = 0.01
    shard_tokens: int = 1 << 27
    tokenizer_file: Path | None = None
    stages: tuple[StageSpec, ...] = ()
    executor: str = "local"
    workers: int = 1

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.sources]
        if not names or len(set(names)) != len(names):
            raise DataError("a data config needs at least one source, each with its own name")
        if not 0 < self.validation_fraction < 1:
            raise DataError(f"validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        if not 257 <= self.vocab_size <= 200_000:
            raise DataError(f"tokenizer.vocab_size must be 257 to 200,000, got {self.vocab_size}")
        if self.shard_tokens < 1 or self.tokenizer_sample_bytes < 1:
            raise DataError("shard_tokens and tokenizer.sample_bytes must be positive")
        for spec in self.sources:
            scoped = [stage.kind for stage in (*spec.stages, *self.stages) if stage.scope == SNAPSHOT]
            if scoped and not any(spec.options.get(name) for name in SNAPSHOT_OPTIONS):
                raise DataError(
                    f"source '{spec.name}': stage {scoped[0]} has scope snapshot, but no option of the source says what"
                    f" the snapshot of a document is; set {' or '.join(SNAPSHOT_OPTIONS)} (kinds jsonl, warc, dataset)"
                )
        if self.executor not in EXECUTORS:
            raise DataError(f"executor must be one of {', '.join(EXECUTORS)}, got {self.executor!r}")
        if not 1 <= self.workers <= MOST_WORKERS:
            raise DataError(f"workers must be 1 to {MOST_WORKERS:,}, got {self.workers}")

    def identity(self) -> dict[str, Any]:
        """Plain values that decide the output's bytes."""
        return {
            "format": FORMAT_VERSION,
            "tokenizers": importlib.metadata.version("tokenizers"),
            "split_pattern": SPLIT_PATTERN,
            "vocab_size": self.vocab_size,
            "tokenizer_sample_bytes": self.tokenizer_sample_bytes,
            "validation_fraction": self.validation_fraction,
            "shard_tokens": self.shard_tokens,
            "sources": [
                [
                    spec.name,
                    spec.kind,
                    spec.licence,
                    spec.options,
                    kind_of(spec).identity(spec),
                    *stage_keys(spec.stages),
                    *([{"language": spec.language}] if spec.language else []),
                ]
                for spec in self.sources
            ],
            **({"stages": stage_keys(self.stages)} if self.stages else {}),
            **({"tokenizer": sha256_file(self.tokenizer_file)} if self.tokenizer_file else {}),
        }
