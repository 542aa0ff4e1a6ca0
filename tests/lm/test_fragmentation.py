"""What windows do to documents, counted by hand; lengths by source; what a run's record says of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lm.config import ModelConfig
from lm.data.lengths import length_row
from lm.data.shards import load_manifest
from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule
from lm.module import LlamaModule
from recipes.data import main as data_command
from recipes.run_record import reading_of, run_facts
from tests.lm.datamodule_helpers import G, T, attach

VOCAB = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list]]:
    path = tmp_path_factory.mktemp("fragments") / "data"
    train = {"web": random_documents(20_000, VOCAB, 25, 0), "long": random_documents(30_000, VOCAB, 400, 1)}
    held = random_documents(900, VOCAB, 25, 2)
    write_folder(path, {name: {"train": d, "validation": held} for name, d in train.items()}, VOCAB, shard_tokens=3000)
    return path, train


def cut_by_hand(documents: list) -> int:
    starts = np.cumsum([0, *map(len, documents)])
    return sum(len({position // T for position in range(a, b)}) > 1 for a, b in itertools.pairwise(starts))


def test_documents_cut_and_padding(folder) -> None:
    path, train = folder
    weights = {"web": 1.0, "web[>=20]": 1.0, "long": 1.0}
    rows = {row.source: row for row in attach(TokenDataModule(str(path), T, G, weights=weights)).fragmentation()}
    kept = [d for d in train["web"] if len(d) >= 20]
    for name, documents in (("web", train["web"]), ("web[>=20]", kept), ("long", train["long"])):
        row = rows[name]
        assert (row.documents, row.cut, row.padding) == (len(documents), cut_by_hand(documents), 0.0)
        assert row.windows == (sum(map(len, documents)) - 1) // T
    packed = attach(TokenDataModule(str(path), T, G, weights=weights, packing="best_fit"))
    rows = {row.source: row for row in packed.fragmentation()}
    for name, documents in (("web", train["web"]), ("web[>=20]", kept), ("long", train["long"])):
        row = rows[name]
        assert row.cut == sum(len(d) > T for d in documents) <= cut_by_hand(documents)
        assert row.padding == pytest.approx(1 - sum(map(len, documents)) / (row.windows * T)) and row.padding > 0


def test_lengths_of_a_source(folder, capsys: pytest.CaptureFixture[str]) -> None:
    path, train = folder
    lengths = np.array([len(d) for d in train["long"]])
    row = length_row(load_manifest(path), "long")
    assert (row.documents, row.tokens, row.longest) == (len(lengths), lengths.sum(), lengths.max())
    for quantile, value in row.percentiles.items():
        exact = np.percentile(lengths, quantile, method="inverted_cdf")
        assert exact <= value <= max(1.0906 * exact, exact + 1)
    assert list(row.at_least) == [p for p in (128, 256, 512, 1024, 2048) if p <= lengths.max()]
    for power, (documents, tokens) in row.at_least.items():
        assert documents == pytest.approx(np.mean(lengths >= power))
        assert tokens == pytest.approx(lengths[lengths >= power].sum() / lengths.sum())
    assert data_command(["lengths", "--dir", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["source"] for each in printed] == ["web", "long"] and printed[1]["longest"] == lengths.max()
    assert data_command(["lengths", "--dir", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{row.at_least[512][1]:.1%}"[:-1] in next(line for line in text.split("\n")[5:] if line.startswith("long"))
    plot = path.parent / "lengths.svg"
    assert data_command(["lengths", "--dir", str(path), "--plot", str(plot)]) == 0
    assert "<svg" in plot.read_text()
    assert data_command(["lengths", "--dir", str(path), "--plot", "lengths.txt"]) == 2
    assert "must end in .png, .svg or .pdf" in capsys.readouterr().err
    assert length_row(load_manifest(path), "long[>=500]").documents == (lengths >= 500).sum()


def test_the_table_of_the_command(folder, capsys: pytest.CaptureFixture[str]) -> None:
    path, train = folder
    common = ["table", "--dir", str(path), "--sequence-length", str(T)]
    assert data_command(common) == 0
    text = capsys.readouterr().out
    assert "packing: cut" in text and f"{cut_by_hand(train['web']):,}" in text.split("packing: cut")[1]
    assert data_command([*common, "--packing", "best_fit"]) == 0
    line = next(x for x in capsys.readouterr().out.split("packing: best_fit")[1].splitlines() if x.startswith("web"))
    assert f"{sum(len(d) > T for d in train['web']):,}" == line.split()[3] and float(line.split()[-1]) > 0
    for options, words in (
        (["--packing", "best_fit"], "--packing best_fit needs --sequence-length"),
        (["--sequence-length", "0"], "--sequence-length must be at least 1"),
    ):
        assert data_command(["table", "--dir", str(path), *options]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_the_record_of_a_run_counts_no_padding(folder, packing: str) -> None:
    path, _ = folder
    data = attach(TokenDataModule(str(path), T, G, packing=packing))
    data.trainer.max_steps = 100
    rows = data.fragmentation()
    trainer = SimpleNamespace(
        datamodule=data,
        max_steps=100,
        strategy=data.trainer.strategy,
        world_size=1,
        precision_plugin=None,
        precision="32",
    )
    facts = run_facts(trainer, LlamaModule(ModelConfig(vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=2)))
    assert facts["packing"] == packing
    assert facts["documents_cut"] == sum(row.cut for row in rows) / sum(row.documents for row in rows) > 0
    share = facts["d_tokens"] / (100 * G)
    assert facts["padding"] == 1 - share
    if packing == "cut":
        assert share == 1
    else:
        per_source = [1 - row.padding for row in rows]
        assert min(per_source) < share < max(per_source) < 1
    text = reading_of(trainer)
    assert f"packing: {packing}\nsource" in text and f"{rows[0].cut:,}" in text.split("packing:")[1]
