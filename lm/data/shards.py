"""Token shards: flat little-endian ids with document ends beside them, and a manifest that describes a data folder.

DIR/manifest.json, DIR/tokenizer.json
DIR/<source>/<split>/shard-00000.bin    ids, uint16 or uint32; every document ends with the end-of-text id
DIR/<source>/<split>/shard-00000.ends   int64, position in the shard of each document's end-of-text id
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.files import DataError, read_json, sha256_file, sync

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "validation")
ENDS_DTYPE = np.dtype("<i8")


def ids_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16, or uint32 as soon as an id can exceed 65,535."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(folder: Path, number: int, documents: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> dict[str, Any]:
    """Write whole documents (ids that end with end-of-text) as one shard, aside and then renamed.

    Returns:
        The shard's row of the manifest: file, tokens, documents, sha256, ends_sha256.
    """
    writer = ShardWriter(folder, number, dtype)
    for document in documents:
        writer.add(document, np.array([len(document)]))
    return writer.close()


class ShardWriter:
    """Writes a shard as its documents come, aside; it is there only after `close`. Memory: 8 bytes a document.

    Attributes:
        tokens: written so far.
    """

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype, self.tokens = folder / f"shard-{number:05d}.bin", dtype, 0
        self._ends = array("q")
        self._digest = hashlib.sha256()
        self._file = _aside(self.path).open("wb")

    def add(self, ids: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Append whole documents.

        Args:
            ids: of all of them, each ended by end-of-text.
            lengths: tokens of each; int64 [documents].
        """
        data = np.ascontiguousarray(ids, self.dtype).data
        self._file.write(data)
        self._digest.update(data)
        self._ends.extend((self.tokens + np.cumsum(lengths) - 1).tolist())
        self.tokens += len(ids)

    def close(self) -> dict[str, Any]:
        """Flush to the disk and give both files their names.

        Returns:
            The shard's row of the manifest: file, tokens, documents, sha256, ends_sha256.
        """
        ends_path, ends = self.path.with_suffix(".ends"), np.array(self._ends, dtype=ENDS_DTYPE)
        with _aside(ends_path).open("wb") as file:
            file.write(ends.data)
            sync(file)
        sync(self._file)
        self._file.close()
        for path in (ends_path, self.path):
            _aside(path).replace(path)
        return {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": len(ends),
            "ends_sha256": hashlib.sha256(ends.data).hexdigest(),
            "sha256": self._digest.hexdigest(),
        }


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


@dataclass(frozen=True)
class Manifest:
    """What a prepared data folder holds; `content` is manifest.json."""

    folder: Path
    content: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer, end-of-text included."""
        return int(self.content["vocab_size"])

    @property
    def eot_id(self) -> int:
        """Id of the end-of-text token."""
        return int(self.content["eot_id"])

    @property
    def source_names(self) -> tuple[str, ...]:
        """Sources in the order of their indices."""
        return tuple(self.content["sources"])

    def split(self, source: str, split: str) -> dict[str, Any]:
        """Counts and shards of one split: documents, tokens, utf8_bytes, shards."""
        return self.content["sources"][source]["splits"][split]

    def tokens(self, split: str) -> dict[str, int]:
        """Tokens of each source's split, end-of-text included."""
        return {name: int(self.split(name, split)["tokens"]) for name in self.source_names}

    def n_bytes(self) -> int:
        """Bytes of all ids and document ends, by the counts."""
        parts = [self.split(name, split) for name in self.source_names for split in SPLITS]
        item_bytes = np.dtype(self.content["dtype"]).itemsize
        return sum(part["tokens"] * item_bytes + part["documents"] * ENDS_DTYPE.itemsize for part in parts)

    def fingerprint(self) -> dict[str, str]:
        """sha256 of the shards (contents and order) and of the tokenizer."""
        return {"shards": self.content["shards_sha256"], "tokenizer": self.content["tokenizer_sha256"]}


def load_manifest(folder: str | Path) -> Manifest:
    """Read DIR/manifest.json and check that the shards are there with the sizes it names.

    Raises:
        DataError: the folder was not prepared, is of another format version, or a shard is missing or short.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder} is not a prepared data folder (no manifest.json);"
            f" run: python -m recipes.data prepare --config conf/data/demo.yaml --out {folder}"
        )
    content = read_json(path)
    if not isinstance(content, dict) or content.get("version") != FORMAT_VERSION:
        raise DataError(f"{path} is not of format version {FORMAT_VERSION}; prepare the data again with --overwrite")
    try:
        _check_content(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{path} is damaged ({type(error).__name__}: {error})"
        raise DataError(f"{what}; prepare the data again with --overwrite") from None
    manifest = Manifest(folder, content)
    for name in manifest.source_names:
        for split in SPLITS:
            _check_sizes(manifest, name, split)
    return manifest


def _check_content(content: dict[str, Any]) -> None:
    """Look at every value that is read later; any error says that one is missing or of another type."""
    if content["dtype"] not in ("<u2", "<u4"):
        raise ValueError(f"dtype {content['dtype']!r}")
    numbers = [content["vocab_size"], content["eot_id"]]
    words = [content["tokenizer_sha256"], content["shards_sha256"]]
    if not content["sources"]:
        raise ValueError("no sources")
    for source in content["sources"].values():
        for split in SPLITS:
            part = source["splits"][split]
            for row in (part, *part["shards"]):
                numbers += [row["tokens"], row["documents"]]
            numbers.append(part["utf8_bytes"])
            words += [row[name] for row in part["shards"] for name in ("file", "sha256", "ends_sha256")]
    odd = [value for value in numbers if not isinstance(value, int) or value < 0]
    odd += [value for value in words if not isinstance(value, str)]
    if odd:
        raise ValueError(f"{odd[0]!r} cannot be")


def _check_sizes(manifest: Manifest, source: str, split: str) -> None:
    item_bytes = np.dtype(manifest.content["dtype"]).itemsize
    inside = manifest.folder.resolve()
    for row in manifest.split(source, split)["shards"]:
        path = manifest.folder / source / split / row["file"]
        if not path.resolve().is_relative_to(inside):
            raise DataError(f"{manifest.folder}/manifest.json names {path}, outside of its folder: refused")
        for file, size in ((path, row["tokens"] * item_bytes), (path.with_suffix(".ends"), row["documents"] * 8)):
            if not file.is_file() or file.stat().st_size != size:
                found = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
                raise DataError(f"{file} is {found} instead of {size} bytes; prepare the data again with --overwrite")


def verify_files(manifest: Manifest, part: int = 0, parts: int = 1) -> tuple[int, int]:
    """Read all shards and the tokenizer, and compare their hashes with the manifest's.

    Args:
        part, parts: of `parts` processes that share the files, the one that this is.

    Returns:
        (files, bytes) read.

    Raises:
        DataError: the first file that differs.
    """
    shards, small = {}, {manifest.folder / "tokenizer.json": manifest.content["tokenizer_sha256"]}
    for source in manifest.source_names:
        for split in SPLITS:
            for row in manifest.split(source, split)["shards"]:
                path = manifest.folder / source / split / row["file"]
                shards[path], small[path.with_suffix(".ends")] = row["sha256"], row["ends_sha256"]
    mine = list((shards | small).items())[part::parts]  # alike are beside each other: everyone gets as much to read
    for path, digest in mine:
        if not path.is_file() or sha256_file(path) != digest:
            raise DataError(f"{path} is not what was prepared (another sha256); prepare it again with --overwrite")
    return len(mine), sum(path.stat().st_size for path, _ in mine)


class TokenStream:
    """One split of one source as a single run of ids, memory-mapped across its shards.

    Attributes:
        n_tokens: ids in all, end-of-text included.
    """

    def __init__(self, manifest: Manifest, source: str, split: str) -> None:
        self._made_from = (manifest, source, split)
        rows = manifest.split(source, split)["shards"]
        folder = manifest.folder / source / split
        dtype = np.dtype(manifest.content["dtype"])
        # Plain array views: slicing a np.memmap costs several times more.
        self._ids = [np.asarray(np.memmap(folder / row["file"], dtype=dtype, mode="r")) for row in rows]
        self._ends = [
            np.asarray(np.memmap(folder / Path(row["file"]).with_suffix(".ends"), dtype=ENDS_DTYPE, mode="r"))
            for row in rows
        ]
        self._starts = np.concatenate([[0], np.cumsum([len(ids) for ids in self._ids])]).astype(np.int64)
        self._documents_before = np.concatenate([[0], np.cumsum([len(ends) for ends in self._ends])]).astype(np.int64)
        self.n_tokens = int(self._starts[-1])

    def __reduce__(self) -> tuple[type[TokenStream], tuple[Manifest, str, str]]:
        """A spawned loader worker maps the files itself instead of being sent their content."""
        return TokenStream, self._made_from

    def read_into(self, start: int, out: NDArray[Any]) -> None:
        """Copy ids [start, start + len(out)) into `out`, across shards where need be."""
        done, shard = 0, 0
        if len(self._ids) > 1:
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < len(out):
            offset = start + done - int(self._starts[shard])
            part = self._ids[shard][offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            shard += 1

    def shard_ends(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(tokens before a shard, positions in it of its documents' end-of-text ids), shard after shard."""
        return zip(self._starts[:-1].tolist(), self._ends, strict=True)

    def ends_before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Documents whose end-of-text id lies before each position; int64, same shape."""
        if len(self._ids) == 1:
            return np.searchsorted(self._ends[0], positions, side="left")
        shard = np.clip(np.searchsorted(self._starts, positions, side="right") - 1, 0, len(self._ids) - 1)
        counts = self._documents_before[shard]
        for index in np.unique(shard):
            mask = shard == index
            local = positions[mask] - self._starts[index]
            counts[mask] += np.searchsorted(self._ends[index], local, side="left")
        return counts
