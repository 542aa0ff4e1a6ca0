"""Slices of a source by document length: the same tokens, labels and order as a source that holds those documents."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.data.changes import LongDocuments
from lm.data.plan import Stage
from lm.data.shards import load_manifest
from lm.data.slices import Slice, SlicedStream, parse_slice, train_tokens
from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule
from lm.errors import ConfigError
from recipes.data import main as data_command
from tests.lm.datamodule_helpers import G, T, attach

VOCAB = 300
RANGES = {"web[>=40]": (40, 10**9), "web[<12]": (0, 12), "web[12:40]": (12, 40)}


def keep(documents, low: int, high: int) -> list:
    return [document for document in documents if low <= len(document) < high]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """(folder with web and other, in several shards; web's documents)."""
    path = tmp_path_factory.mktemp("slices") / "data"
    web, other, held = (random_documents(n, VOCAB, 25, seed) for seed, n in enumerate((20_000, 9_000, 2_000)))
    splits = {"web": {"train": web, "validation": held}, "other": {"train": other, "validation": held}}
    write_folder(path, splits, VOCAB, shard_tokens=3000)
    return path, web


@pytest.mark.parametrize("name", RANGES)
def test_a_slice_reads_as_its_documents_joined(folder, name: str) -> None:
    path, web = folder
    kept = keep(web, *RANGES[name])
    joined = np.concatenate(kept)
    stream = SlicedStream(load_manifest(path), parse_slice(name), "train")
    assert (stream.n_tokens, stream.n_documents) == (len(joined), len(kept)) and len(kept) > 20
    assert train_tokens(load_manifest(path), [name])[name] == len(joined)
    for start in (0, 1, 37, len(joined) // 2, len(joined) - 50):
        out = np.empty(50, dtype=np.int64)
        stream.read_into(start, out)
        assert np.array_equal(out, joined[start : start + 50])
    positions = np.arange(len(joined) + 1)
    assert np.array_equal(stream.ends_before(positions), np.concatenate([[0], np.cumsum(joined == 0)]))
    assert pickle.loads(pickle.dumps(stream)).n_tokens == len(joined) and len(pickle.dumps(stream)) < 20_000


@pytest.mark.parametrize("name", RANGES)
def test_training_on_a_slice_is_training_on_a_source_of_those_documents(folder, tmp_path: Path, name: str) -> None:
    """Batch for batch, with loader workers too; only the keys of the permutations know the name."""
    path, web = folder
    alone = {"train": keep(web, *RANGES[name]), "validation": web[:50]}
    write_folder(tmp_path / "d", {name: alone}, VOCAB)
    wanted = attach(TokenDataModule(str(tmp_path / "d"), T, G, 4)).train_dataloader()
    for workers in (0, 2):
        data = attach(TokenDataModule(str(path), T, G, 4, weights={name: 2.0}, num_workers=workers))
        assert data.source_weights == {"web": 1.0}
        for ours, theirs in itertools.islice(zip(data.train_dataloader(), wanted, strict=True), 60):
            for key in ("input_ids", "labels", "document_ids", "source", "loss_tokens"):
                assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])), key


def test_a_mix_of_slices_keeps_its_shares_and_its_fingerprint(folder) -> None:
    path, _ = folder
    weights = {"other": 0.5, "web[>=40]": 0.25, "web[<40]": 0.25}
    data = attach(TokenDataModule(str(path), T, G, 4, weights=weights))
    assert data.source_names == ("web", "other") and data.order.source_names[2:] == ("web[<40]", "web[>=40]")
    index, _ = data.order.locate(np.arange(4096))
    shares = np.bincount(index, minlength=4) / 4096
    assert dict(zip(data.order.source_names, shares.tolist(), strict=True)) == {"web": 0.0, **weights}
    batches = list(itertools.islice(data.train_dataloader(), 64))
    assert {int(i) for batch in batches for i in batch["source"]} == {0, 1}  # slices count for their source
    assert data.fingerprint()["plan"]["stages"][0]["weights"] == weights
    state = data.state_dict() | {"step": 5}
    other = attach(TokenDataModule(str(path), T, G, 4, weights={**weights, "web[>=40]": 0.3}))
    with pytest.raises(ConfigError, match="stage 0's weights"):
        other.load_state_dict(state)


def test_a_stage_to_come_does_not_move_what_was_before_it(folder) -> None:
    path, _ = folder
    plain = attach(TokenDataModule(str(path), T, G, 4)).train_dataloader()
    later = [Stage(4 * G, T, {"web[>=40]": 1.0})]
    staged = attach(TokenDataModule(str(path), T, G, 4, stages=later)).train_dataloader()
    for step, (a, b) in enumerate(itertools.islice(zip(plain, staged, strict=True), 12)):
        assert torch.equal(a["input_ids"], b["input_ids"]) == (step < 8)  # 2 micro-batches a step


def test_long_documents_split_a_mix() -> None:
    split = LongDocuments(100, 0.75).split({"a": 2.0, "b": 0.0, "c[>=7]": 1.0})
    assert split == {"a[>=100]": 1.5, "a[<100]": 0.5, "b": 0.0, "c[>=7]": 1.0}
    assert LongDocuments(100).split({"a": 2.0}) == {"a[>=100]": 2.0}
    for bad in ((1, 0.5), (10, 0.0), (10, 1.5)):
        with pytest.raises(ConfigError, match="long_documents"):
            LongDocuments(*bad)


def test_names_of_slices() -> None:
    assert parse_slice("web") is None
    assert parse_slice("web[>=5]") == Slice("web", 5) and parse_slice("web[2:5]") == Slice("web", 2, 5)
    for bad in ("web[5]", "web[>5]", "web[]", "web[5:5]", "web[<0]", "[>=5]", "web[>=5]x"):
        with pytest.raises(ConfigError, match="in weights"):
            parse_slice(bad)


def test_mistakes_are_one_line(folder) -> None:
    path, _ = folder
    for weights, words in (
        ({"web[>=9999]": 1.0}, "no document of such a length"),
        ({"nope[>=5]": 1.0}, r"unknown source 'nope\[>=5\]'"),
        ({"web[8k]": 1.0}, r"write SOURCE\[>=N\]"),
    ):
        with pytest.raises(ConfigError, match=words):
            attach(TokenDataModule(str(path), T, G, 4, weights=weights))


def test_the_table_counts_a_slice(folder, capsys: pytest.CaptureFixture[str]) -> None:
    path, web = folder
    assert data_command(["table", "--dir", str(path), "--tokens", "40_000", "--weights", "web[>=40]=1"]) == 0
    n = sum(map(len, keep(web, 40, 10**9)))
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("web[>=40]"))
    assert row[2] == f"{n:,}" and row[-1] == f"{40_000 / n:.2f}"
