"""A data folder of given or random ids, in the format of a prepared one: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.files import sha256_json, write_bytes, write_json
from lm.data.shards import FORMAT_VERSION, SPLITS, Manifest, ids_dtype, load_manifest, write_shard

Documents = Sequence[NDArray[Any]]


def write_folder(
    folder: Path, sources: Mapping[str, Mapping[str, Documents]], vocab_size: int, shard_tokens: int = 1 << 27
) -> Manifest:
    """Write documents (ids that end with 0, the end-of-text id) as a data folder.

    The tokenizer of the folder knows the 256 bytes as ids 1 to 256 and fills the rest with merges it never applies.

    Args:
        sources: name -> split -> documents; both splits are needed.
        vocab_size: ids, at least 257.
        shard_tokens: a shard is closed after the document that reaches it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "config_sha256": "synthetic",
        "vocab_size": vocab_size,
        "eot_id": 0,
        "dtype": ids_dtype(vocab_size).str,
        "tokenizer_sha256": _write_tokenizer(folder, vocab_size),
        "sources": {},
    }
    for name, splits in sources.items():
        rows = {split: _write_split(folder / name / split, splits[split], vocab_size, shard_tokens) for split in SPLITS}
        content["sources"][name] = {"kind": "synthetic", "licence": "none", "splits": rows}
    content["shards_sha256"] = sha256_json(content["sources"])
    write_json(folder / "manifest.json", content)
    return load_manifest(folder)


def random_documents(n_tokens: int, vocab_size: int, mean_length: int, seed: int) -> list[NDArray[np.uint32]]:
    """Documents of random ids above 0 with geometric lengths, each ended by 0; n_tokens in all."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, vocab_size, n_tokens, dtype=np.uint32)
    ends = np.flatnonzero(rng.random(n_tokens) < 1 / mean_length)
    ids[ends] = 0
    ids[-1] = 0
    return [part for part in np.split(ids, ends + 1) if len(part)]


def _write_split(folder: Path, documents: Documents, vocab_size: int, shard_tokens: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    pending: list[NDArray[Any]] = []
    pending_tokens = 0
    for number, document in enumerate(documents, start=1):
        pending.append(document)
        pending_tokens += len(document)
        if pending_tokens >= shard_tokens or number == len(documents):
            rows.append(write_shard(folder, len(rows), pending, ids_dtype(vocab_size)))
            pending, pending_tokens = [], 0
    tokens = sum(row["tokens"] for row in rows)
    return {"documents": len(documents), "tokens": tokens, "utf8_bytes": tokens - len(documents), "shards": rows}


def _write_tokenizer(folder: Path, vocab_size: int) -> str:
    import hashlib

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from lm.data.tokenizer import END_OF_TEXT

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {END_OF_TEXT: 0} | {character: i for i, character in enumerate(alphabet, start=1)}
    for number in range(len(vocab), vocab_size):
        vocab[f"unused{number}"] = number
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    data = tokenizer.to_str().encode()
    write_bytes(folder / "tokenizer.json", data)
    return hashlib.sha256(data).hexdigest()
