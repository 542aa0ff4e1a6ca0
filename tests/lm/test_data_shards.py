"""Shards and windows: dtypes, windows across shards, labels and documents at boundaries, damaged folders."""

import json
import pickle

import numpy as np
import pytest
import torch

from lm.data.files import DataError
from lm.data.shards import TokenStream, ids_dtype, load_manifest, verify_files, write_shard
from lm.data.synthetic import random_documents, write_folder
from lm.data.windows import NO_LABEL, WindowReader

VOCAB = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "many"
    sources = {
        name: {
            split: random_documents(n, VOCAB, 20, seed)
            for seed, (split, n) in enumerate((("train", 5000), ("validation", 900)))
        }
        for name in ("a", "b")
    }
    return write_folder(path, sources, VOCAB, shard_tokens=333)


def whole(manifest, source, split="train") -> np.ndarray:
    rows = manifest.split(source, split)["shards"]
    return np.concatenate([np.fromfile(manifest.folder / source / split / row["file"], "<u2") for row in rows])


def test_dtype_grows_with_the_vocabulary(tmp_path) -> None:
    assert ids_dtype(65_536) == np.dtype("<u2") and ids_dtype(65_537) == np.dtype("<u4")
    row = write_shard(tmp_path, 0, [np.array([65_536, 70_000, 0], dtype=np.uint32)], ids_dtype(70_001))
    assert np.fromfile(tmp_path / row["file"], "<u4").tolist() == [65_536, 70_000, 0]
    assert np.fromfile(tmp_path / "shard-00000.ends", "<i8").tolist() == [2]


def test_windows_across_shards_equal_the_flat_stream(folder) -> None:
    flat = whole(folder, "a")
    stream = TokenStream(folder, "a", "train")
    assert len(folder.split("a", "train")["shards"]) > 10 and stream.n_tokens == len(flat) == 5000
    for length in (1, 7, 400, 1000):
        for start in range(0, 5000 - length, 97):
            out = np.empty(length, dtype=np.int64)
            stream.read_into(start, out)
            assert np.array_equal(out, flat[start : start + length])


def test_ends_before_equals_a_count_of_end_of_text(folder) -> None:
    flat = whole(folder, "a")
    positions = np.arange(0, 5001)
    expected = np.concatenate([[0], np.cumsum(flat == 0)])
    assert np.array_equal(TokenStream(folder, "a", "train").ends_before(positions), expected)


def test_labels_and_documents(folder) -> None:
    reader = WindowReader(folder, "train", ("a", "b"))
    source, window = np.array([0, 1, 0]), np.array([0, 3, 77])
    batch = reader.batch(source, window, 64)
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["source"].dtype == torch.int64
    assert batch["document_ids"].dtype == torch.int32
    for row, (s, j) in enumerate(zip(source, window, strict=True)):
        flat = whole(folder, "ab"[s]).astype(np.int64)
        inputs, labels = flat[j * 64 : j * 64 + 64], flat[j * 64 + 1 : j * 64 + 65].copy()
        labels[inputs == 0] = NO_LABEL
        assert batch["input_ids"][row].tolist() == inputs.tolist()
        assert batch["labels"][row].tolist() == labels.tolist()
        document = 0
        for t in range(64):
            assert batch["document_ids"][row, t] == document
            document += int(inputs[t] == 0)
    assert batch["source"].tolist() == [0, 1, 0]


def test_no_label_crosses_a_document(folder) -> None:
    batch = WindowReader(folder, "train", ("a",)).batch(np.zeros(50, np.int64), np.arange(50), 64)
    inputs, labels, documents = (batch[key] for key in ("input_ids", "labels", "document_ids"))
    same = documents[:, 1:] == documents[:, :-1]
    assert torch.equal(labels[:, :-1] != NO_LABEL, same)  # a label exactly where the next token is of this document
    assert torch.equal(labels[:, :-1][same], inputs[:, 1:][same])  # shifted once


def test_count_labels_equals_the_batch(folder) -> None:
    reader = WindowReader(folder, "train", ("a", "b"))
    source, window = np.arange(60) % 2, np.arange(60)
    expected = (reader.batch(source, window, 64)["labels"] != NO_LABEL).sum(dim=1)
    assert reader.count_labels(source, window, 64).tolist() == expected.tolist()


def test_processes_that_verify_together_read_as_much_each(folder) -> None:
    files, read = zip(*(verify_files(folder, part, 2) for part in range(2)), strict=True)
    assert (sum(files), sum(read)) == verify_files(folder)
    assert max(read) < 0.7 * sum(read)


def test_stream_pickles_by_path(folder) -> None:
    data = pickle.dumps(TokenStream(folder, "a", "train"))
    assert len(data) < 20_000
    assert pickle.loads(data).n_tokens == 5000


def test_damaged_folders_are_one_clear_line(folder, tmp_path) -> None:
    with pytest.raises(DataError, match=r"not a prepared data folder .*recipes.data prepare"):
        load_manifest(tmp_path)
    documents = {"a": {split: random_documents(200, VOCAB, 20, 0) for split in ("train", "validation")}}
    short = write_folder(tmp_path / "short", documents, VOCAB)
    path = short.folder / "a" / "train" / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="is 398 bytes instead of 400 bytes"):
        load_manifest(short.folder)
    path.unlink()
    with pytest.raises(DataError, match="is missing instead of 400 bytes"):
        load_manifest(short.folder)
    (short.folder / "manifest.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(DataError, match="not of format version"):
        load_manifest(short.folder)
    (short.folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        load_manifest(short.folder)
