"""Preparing data in one folder, in stages that finish before they count: documents, tokenizer, shards, manifest."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from lm.data.documents import DIGEST_BYTES, TextFile, collect, require_both_splits
from lm.data.encoder import EncodedPart, encode_part
from lm.data.executor import Executor
from lm.data.files import DataError, discard, read_json, sha256_file, sha256_json, write_bytes, write_json
from lm.data.pieces import segments
from lm.data.pipeline.funnel import source_rows, write_funnel
from lm.data.pipeline.kinds import prune_built
from lm.data.pipeline.run import REPORT, Pipeline, documents_of
from lm.data.pipeline.shared import after_all_stages
from lm.data.pipeline.stage import BUILT
from lm.data.pipeline.store import Documents
from lm.data.prepare_config import PrepareConfig
from lm.data.shards import FORMAT_VERSION, MANIFEST, SPLITS, ShardWriter, ids_dtype
from lm.data.sources import Document, SourceSpec, kind_of
from lm.data.tokenizer import end_of_text_id, load_tokenizer, train_tokenizer

PROGRESS_SECONDS = 5.0

Log = Callable[[str], None]
T = TypeVar("T")


class Preparation:
    """The stages, in one partial folder; `.work/` in it (a name no source can have) is what only later stages need.

    `cache` keeps the outcome of each source's own stages, also for a later config (lm.data.pipeline.run).
    """

    def __init__(
        self, config: PrepareConfig, identity: str, folder: Path, cache: Path, log: Log, executor: Executor
    ) -> None:
        self.config, self.identity, self.folder, self.cache, self.log = config, identity, folder, cache, log
        self.executor = executor
        self.work = folder / ".work"

    def run(self) -> None:
        """All stages; ends with a complete folder, still under its hidden name."""
        if not self._is_complete():
            self._start_or_resume()
            reports = self.collect_all()
            tokenizer_sha256 = self.make_tokenizer(reports)
            splits = self.tokenize_all()
            self.write_funnel(reports, splits)
            self.write_manifest(reports, tokenizer_sha256, splits)
        # A kill while .work/ goes leaves a folder that is complete all the same.
        shutil.rmtree(self.work, ignore_errors=True)

    def _is_complete(self) -> bool:
        manifest = self.folder / MANIFEST
        return manifest.is_file() and read_json(manifest)["config_sha256"] == self.identity

    def _start_or_resume(self) -> None:
        marker = self.work / "identity.json"
        if self.folder.exists() and not (marker.is_file() and read_json(marker) == self.identity):
            discard(self.folder, MANIFEST, ".work/identity.json")
            if self.folder.exists():
                raise DataError(f"{self.folder} cannot be removed whole, and its rest would count as done; remove it")
        self.work.mkdir(parents=True, exist_ok=True)
        write_json(marker, self.identity)

    # -- stage 1: documents

    def collect_all(self) -> dict[str, dict[str, Any]]:
        """Text files and report of each source."""
        seen: set[bytes] = set()
        reports = {}
        for spec in self.config.sources:
            reports[spec.name] = self._collect(spec, seen)
        self._prune_sources()
        prune_built(
            self.cache, [stage for spec in self.config.sources for stage in spec.stages] + [*self.config.stages]
        )
        return reports

    def _prune_sources(self) -> None:
        """Remove from the cache sources that the config no longer has, or has without stages."""
        staged = {spec.name for spec in self.config.sources if spec.stages or self.config.stages}
        for path in self.cache.iterdir() if self.cache.is_dir() else ():
            if path.is_dir() and path.name not in staged | {BUILT}:
                discard(path, *(f"{step.name}/{REPORT}" for step in path.iterdir() if step.is_dir()))

    def _collect(self, spec: SourceSpec, seen: set[bytes]) -> dict[str, Any]:
        folder = self.work / spec.name
        done, digests = folder / "report.json", folder / "digests"
        if done.is_file():
            packed = digests.read_bytes()
            seen.update(packed[i : i + DIGEST_BYTES] for i in range(0, len(packed), DIGEST_BYTES))
            self.log(f"{spec.name}: documents collected before")
            return dict(read_json(done))
        folder.mkdir(parents=True, exist_ok=True)
        documents = _counted(self._documents(spec), f"{spec.name}: %s documents read", self.log)
        report, own = collect(documents, folder, self.config.validation_fraction, seen)
        if not report.read and (spec.stages or self.config.stages):
            raise _nothing_left(spec.name, read_json(folder / "stages.json"))
        require_both_splits(spec.name, report)
        seen |= own
        write_bytes(digests, b"".join(sorted(own)))
        write_json(done, report.plain())
        self.log(f"{spec.name}: {report.line()}")
        return report.plain()

    def _documents(self, spec: SourceSpec) -> Iterator[Document]:
        """Documents of a source after its own stages and those of the config."""
        if self.config.stages:
            documents, reports = self._after_all_stages[spec.name]
        elif spec.stages:
            pipeline = Pipeline(spec, self.cache, self.log, self.executor)
            documents, reports = pipeline.run()
            pipeline.prune()
        else:
            return kind_of(spec).documents(spec)
        write_json(self.work / spec.name / "stages.json", reports)
        return documents_of(documents)

    @cached_property
    def _after_all_stages(self) -> dict[str, tuple[Documents, list[dict[str, Any]]]]:
        return after_all_stages(self.config.sources, self.config.stages, self.cache, self.log, self.executor)

    # -- stage 2: tokenizer

    def make_tokenizer(self, reports: dict[str, dict[str, Any]]) -> str:
        """Train or copy tokenizer.json if it is not there yet; its sha256."""
        path = self.folder / "tokenizer.json"
        if not path.is_file() and self.config.tokenizer_file:
            write_bytes(path, self.config.tokenizer_file.read_bytes())
        elif not path.is_file():
            tokenizer = train_tokenizer(self._sample(reports), self.config.vocab_size)
            write_bytes(path, tokenizer.to_str(pretty=True).encode())
            self.log(f"tokenizer: vocabulary of {self.config.vocab_size:,}")
        return sha256_file(path)

    def _sample(self, reports: dict[str, dict[str, Any]]) -> Iterator[str]:
        """An even, deterministic choice of train documents, equal bytes a source where there are enough.

        Of a document longer than a segment, of its segments: all of it may be more than a source's share.
        """
        share = self.config.tokenizer_sample_bytes // len(self.config.sources)
        for spec in self.config.sources:
            total = reports[spec.name]["kept_bytes"]["train"]
            taken = 0
            for text in chain.from_iterable(map(segments, TextFile(self.work / spec.name, "train").texts())):
                encoded = text.encode()
                digest = hashlib.sha256(b"sample\x00")
                digest.update(encoded)
                chosen = int.from_bytes(digest.digest()[:8], "little") < share / total * 2.0**64
                if chosen and taken + len(encoded) <= share:
                    taken += len(encoded)
                    yield text

    # -- stage 3: shards

    def tokenize_all(self) -> dict[str, dict[str, Any]]:
        """Shards of each source and split; rows of the manifest."""
        return {
            spec.name: {split: self._tokenize(spec.name, split) for split in SPLITS} for spec in self.config.sources
        }

    def _tokenize(self, name: str, split: str) -> dict[str, Any]:
        target = self.folder / name / split
        target.mkdir(parents=True, exist_ok=True)
        progress = self.work / name / f"{split}.shards.json"
        state: dict[str, Any] = {"complete": False, "utf8_bytes": 0, "shards": []}
        if progress.is_file():
            state = read_json(progress)
        if not state["complete"]:
            self._write_shards(name, split, state, progress)
        rows = state["shards"]
        tokens, documents = (sum(row[key] for row in rows) for key in ("tokens", "documents"))
        return {"documents": documents, "tokens": tokens, "utf8_bytes": state["utf8_bytes"], "shards": rows}

    def _write_shards(self, name: str, split: str, state: dict[str, Any], progress: Path) -> None:
        writer: ShardWriter | None = None
        utf8_bytes = 0

        def close(full: ShardWriter) -> None:
            row = full.close()
            state["shards"].append(row)
            state["utf8_bytes"] += utf8_bytes
            write_json(progress, state)
            self.log(f"{name}/{split}: {row['file']}, {row['tokens']:,} tokens")

        for encoded in self._encoded(name, split, sum(row["documents"] for row in state["shards"])):
            rest: EncodedPart | None = encoded
            while rest is not None:
                if writer is None:
                    number = len(state["shards"])
                    writer, utf8_bytes = ShardWriter(self.folder / name / split, number, encoded.ids.dtype), 0
                now, rest = rest.until(self.config.shard_tokens - writer.tokens)
                writer.add(now.ids, now.lengths)
                utf8_bytes += int(now.sizes.sum())
                if writer.tokens >= self.config.shard_tokens:
                    close(writer)
                    writer = None
        if writer is not None:
            close(writer)
        state["complete"] = True
        write_json(progress, state)

    def _encoded(self, name: str, split: str, first: int) -> Iterator[EncodedPart]:
        """Documents from number `first` on as ids, part by part; with a log line every few seconds."""
        path = self.folder / "tokenizer.json"
        digest, dtype = sha256_file(path), ids_dtype(self.config.vocab_size)
        calls = ((part, path, digest, dtype) for part in TextFile(self.work / name, split).parts(first))
        done, due = first, time.monotonic() + PROGRESS_SECONDS
        for encoded in self.executor.map(encode_part, calls):
            yield encoded
            done += len(encoded.lengths)
            if time.monotonic() >= due:
                self.log(f"{name}/{split}: {done:,} documents")
                due = time.monotonic() + PROGRESS_SECONDS

    # -- stage 4: funnel and manifest

    def write_funnel(self, reports: dict[str, dict[str, Any]], splits: dict[str, dict[str, Any]]) -> None:
        """What each stage took, if there are stages."""
        if not self.config.stages and not any(spec.stages for spec in self.config.sources):
            return
        rows = {}
        for spec in self.config.sources:
            staged = self.config.stages or spec.stages
            stages = read_json(self.work / spec.name / "stages.json") if staged else []
            rows[spec.name] = source_rows(stages, reports[spec.name], splits[spec.name]["train"])
        write_funnel(self.folder, rows)

    def write_manifest(
        self, reports: dict[str, dict[str, Any]], tokenizer_sha256: str, splits: dict[str, dict[str, Any]]
    ) -> None:
        """manifest.json, last of all."""
        hashes = [
            [name, split, row["sha256"], row["ends_sha256"]]
            for name, by_split in splits.items()
            for split, rows in by_split.items()
            for row in rows["shards"]
        ]
        content = {
            "version": FORMAT_VERSION,
            "config_sha256": self.identity,
            "vocab_size": self.config.vocab_size,
            "eot_id": end_of_text_id(load_tokenizer(self.folder)),
            "dtype": ids_dtype(self.config.vocab_size).str,
            "tokenizer_sha256": tokenizer_sha256,
            "shards_sha256": sha256_json(hashes),
            "sources": {
                spec.name: {
                    "kind": spec.kind,
                    "licence": spec.licence,
                    **({"language": spec.language} if spec.language else {}),
                    "report": reports[spec.name],
                    "splits": splits[spec.name],
                }
                for spec in self.config.sources
            },
        }
        write_json(self.folder / MANIFEST, content)


def _nothing_left(name: str, reports: list[dict[str, Any]]) -> DataError:
    """The error of a source whose stages, or its reading, dropped every document."""
    row = next(row for row in reports if not row["documents_out"])
    if not row["documents_in"]:
        return DataError(f"source '{name}' holds no document; add some or remove it")
    reason, count = next(iter(row["dropped"].items()))  # the most frequent
    sample = row["samples"].get(reason, [{}])[0].get("detail")
    return DataError(
        f"source '{name}': no document is left after {row['stage']} ({count['documents']:,} of {row['documents_in']:,}:"
        f" {reason}{f', as in: {sample}' if sample else ''}); change the options of the stage or remove it"
    )


def _counted(items: Iterator[T], line: str, log: Log) -> Iterator[T]:
    """The items; every few seconds a log line with how many there were so far."""
    due = time.monotonic() + PROGRESS_SECONDS
    for number, item in enumerate(items, start=1):
        yield item
        if time.monotonic() >= due:
            log(line % f"{number:,}")
            due = time.monotonic() + PROGRESS_SECONDS
