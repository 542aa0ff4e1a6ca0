"""Best-fit packing: every token once an epoch, no short document cut, order a function of k, padding without loss."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.data.best_fit import best_fit, pieces_of
from lm.data.files import DataError
from lm.data.packing import VERSION, PackedStream, _index_of
from lm.data.plan import Stage
from lm.data.shards import load_manifest
from lm.data.slices import Slice
from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule
from lm.errors import ConfigError
from lm.init import materialize
from lm.model import Llama
from tests.lm.datamodule_helpers import SaveAt, attach, fit, make

T, SAMPLES = 16, 8
G = T * SAMPLES


def numbered_documents(lengths: list[int], first: int) -> list:
    """Documents in which no id but the end-of-text comes twice: `first`, `first` + 1, ..."""
    documents, at = [], first
    for length in lengths:
        documents.append(np.array([*range(at, at + length - 1), 0], dtype=np.uint32))
        at += length - 1
    return documents


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list]]:
    """A folder of two sources in several shards, and its train documents: each id tells which token it is."""
    rng = np.random.default_rng(0)
    lengths = [np.minimum(1 + rng.geometric(0.08, 300), 90).tolist() for _ in range(2)]
    lengths[0][:4] = [1, T, T + 1, 3 * T]  # an empty one; just fits; one token too long; cut without a rest
    web = numbered_documents(lengths[0], 1)
    books = numbered_documents(lengths[1], 1 + sum(map(len, web)))
    vocab_size = max(int(d.max()) for d in books) + 1
    held = random_documents(500, 300, 25, 1)
    path = tmp_path_factory.mktemp("packing") / "data"
    splits = {"web": {"train": web, "validation": held}, "books": {"train": books, "validation": held}}
    write_folder(path, splits, vocab_size, shard_tokens=900)
    return path, {"web": web, "books": books}


def packed(path: Path, **changes) -> TokenDataModule:
    settings = {"sequence_length": T, "global_batch_tokens": G, "seed": 5, "packing": "best_fit", **changes}
    return TokenDataModule(str(path), **settings)


def windows_of(path: Path, source: str, epochs: int = 1, sequence_length: int = T) -> dict[str, torch.Tensor]:
    """All rows of the first epochs of one source, joined."""
    count = PackedStream(load_manifest(path), source, "train", sequence_length).counts.windows
    data = attach(
        packed(path, weights={source: 1}, global_batch_tokens=sequence_length, sequence_length=sequence_length)
    )
    batches = list(itertools.islice(data.train_dataloader(), count * epochs))
    return {key: torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels", "document_ids")}


# -- the packing itself


@pytest.mark.parametrize("seed", range(20))
def test_best_fit_is_that_of_one_piece_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    window = int(rng.integers(2, 60))
    lengths = rng.integers(1, window + 1, rng.integers(1, 200))
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fits = [room for room in rooms if room >= length]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else window) - length)
    used = np.bincount(best_fit(lengths, window), weights=lengths)
    assert sorted(window - used) == sorted(rooms)


def test_pieces() -> None:
    document, offset, length = pieces_of(np.array([3, 10, 4, 8]), 4)
    assert document.tolist() == [0, 1, 1, 1, 2, 3, 3]
    assert offset.tolist() == [0, 0, 4, 8, 0, 0, 4] and length.tolist() == [3, 4, 4, 2, 4, 4, 4]
    assert [len(part) for part in pieces_of(np.array([], dtype=np.int64), 4)] == [0, 0, 0]
    assert len(best_fit(np.array([], dtype=np.int64), 4)) == 0


def test_density_on_the_lengths_of_a_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Log-normal lengths, median 400 and mean 830 tokens, as web text has: 100,000 documents in windows of 2,048."""
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(6.0, 1.2, 100_000)).astype(np.int64)
    _, _, pieces = pieces_of(lengths, 2048)
    windows = int(best_fit(pieces, 2048).max()) + 1
    padding = 1 - lengths.sum() / (windows * 2048)
    ends = np.cumsum(lengths) - 1
    cut = np.mean((ends + 1 - lengths) // 2048 != ends // 2048)
    with capsys.disabled():
        print(f"\npadding {padding:.4%}; cut: best fit {np.mean(lengths > 2048):.1%}, concatenated {cut:.1%}")
    assert 0 <= padding < 0.001
    assert cut > 3 * np.mean(lengths > 2048)


# -- tokens


@pytest.mark.parametrize("source", ["web", "books"])
@pytest.mark.parametrize("sequence_length", [T, 40])
def test_every_token_once_an_epoch_as_input_and_as_label(numbered, source: str, sequence_length: int) -> None:
    path, documents = numbered
    tokens = np.concatenate(documents[source])
    rows = windows_of(path, source, sequence_length=sequence_length)
    is_token = rows["input_ids"] > 0
    assert np.array_equal(np.sort(rows["input_ids"][is_token].numpy()), np.sort(tokens[tokens > 0]))
    # All but the first token of a document are labels, each of the token before it; so is each end-of-text.
    wanted = {(int(a), int(b)) for d in documents[source] for a, b in itertools.pairwise(d.tolist())}
    labelled = rows["labels"] >= 0
    pairs = list(zip(rows["input_ids"][labelled].tolist(), rows["labels"][labelled].tolist(), strict=True))
    assert len(pairs) == len(set(pairs)) == sum(len(d) - 1 for d in documents[source]) and set(pairs) == wanted
    n_ends = len(documents[source])
    padding = PackedStream(load_manifest(path), source, "train", sequence_length).counts.padding(sequence_length)
    assert int((~is_token).sum()) - n_ends == round(padding * is_token.numel())


def test_no_document_that_fits_is_cut_and_no_id_is_shared(numbered) -> None:
    path, documents = numbered
    rows = windows_of(path, "web")
    seen = {}
    for ids, marks in zip(rows["input_ids"].tolist(), rows["document_ids"].tolist(), strict=True):
        for _, group in itertools.groupby(zip(marks, ids, strict=True), key=lambda pair: pair[0]):
            piece = [token for _, token in group]
            seen[piece[0]] = piece
        assert marks == sorted(marks) and marks[0] == 0
    for document in documents["web"]:
        if 1 < len(document) <= T:
            assert seen[document[0]] == document.tolist()
    counts = PackedStream(load_manifest(path), "web", "train", T).counts
    assert counts.cut == sum(len(d) > T for d in documents["web"]) and counts.documents == 300
    assert counts.tokens == sum(map(len, documents["web"]))


def test_the_second_epoch_has_the_same_windows_in_another_order(numbered) -> None:
    ids = windows_of(numbered[0], "web", epochs=2)["input_ids"].tolist()
    first, second = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    assert sorted(first) == sorted(second) and first != second


def test_a_slice_packs_its_documents_alone(numbered) -> None:
    path, documents = numbered
    ids = windows_of(path, "web[>=10]")["input_ids"]
    wanted = np.concatenate([d for d in documents["web"] if len(d) >= 10])
    assert np.array_equal(np.sort(ids[ids > 0].numpy()), np.sort(wanted[wanted > 0]))


# -- order


def test_the_stream_depends_on_nothing_but_the_step(numbered) -> None:
    """Ranks, micro-batches, workers and a later start give the same rows at the same steps, and the same divisor."""
    path, _ = numbered
    whole = list(itertools.islice(attach(packed(path)).train_dataloader(), 20))
    for world_size, micro, workers, start in ((1, 2, 0, 0), (2, 1, 2, 3), (4, 2, 0, 7)):
        parts = []
        for rank in range(world_size):
            data = attach(packed(path, micro_batch_size=micro, num_workers=workers), rank, world_size, step=start)
            per_step = SAMPLES // world_size // micro
            batches = list(itertools.islice(data.train_dataloader(), per_step * 10))
            parts.append([batches[i : i + per_step] for i in range(0, len(batches), per_step)])
        for number in range(10):
            step = whole[start + number]
            for key in ("input_ids", "labels", "document_ids", "source"):
                rows = torch.cat([batch[key] for rank in parts for batch in rank[number]])
                assert torch.equal(rows, step[key])
            batches = [batch for rank in parts for batch in rank[number]]
            assert sum(batch["loss_tokens"] for batch in batches) == pytest.approx(int((step["labels"] >= 0).sum()))
            assert sum(batch["padding"] for batch in batches) == step["padding"]


def test_a_resume_goes_on_and_dropped_ranges_are_jumped_over(tmp_path: Path) -> None:
    documents = {"train": random_documents(9_000, 300, 9, 0), "validation": random_documents(900, 300, 9, 1)}
    write_folder(tmp_path / "d", {"a": documents, "b": documents}, 300, shard_tokens=2000)
    folder, settings = tmp_path / "d", {"packing": "best_fit"}
    whole = fit(folder, 8, **settings)[0].by_step()
    fit(folder, 5, callbacks=[SaveAt(tmp_path / "a.ckpt", 5)], **settings)
    module, _, _ = fit(folder, 8, tmp_path / "a.ckpt", micro_batch_size=2, **settings)
    assert sorted(module.by_step()) == [5, 6, 7]
    assert all(torch.equal(ids, whole[step]) for step, ids in module.by_step().items())
    with pytest.raises(ConfigError, match="packing is cut, was best_fit"):
        fit(folder, 8, tmp_path / "a.ckpt")
    skipping = attach(make(folder, **settings))
    skipping.skip_samples([(2 * SAMPLES, 4 * SAMPLES)])
    ids = [batch["input_ids"] for batch in itertools.islice(skipping.train_dataloader(), 4)]
    assert all(torch.equal(ids[i], whole[step]) for i, step in enumerate((0, 1, 4, 5)))


def test_weights_are_shares_of_tokens_and_padding_is_none(tmp_path: Path) -> None:
    """One source fills its windows, the other 10 of 16: its windows come 1.6 times as often."""
    rng = np.random.default_rng(0)

    def make_documents(length: int, count: int) -> list:
        return [np.array([*rng.integers(1, 300, length - 1), 0], dtype=np.uint32) for _ in range(count)]

    sources = {
        name: {"train": make_documents(length, 2000), "validation": make_documents(8, 20)}
        for name, length in (("full", 8), ("loose", 10))
    }
    write_folder(tmp_path / "d", sources, 300)
    data = attach(packed(tmp_path / "d", weights={"full": 1, "loose": 1}))
    steps = list(itertools.islice(data.train_dataloader(), 128))
    held = torch.zeros(2, dtype=torch.int64)
    for batch in steps:
        per_row = torch.where(batch["source"] == 0, 16, 10)
        held += torch.zeros(2, dtype=torch.int64).index_add_(0, batch["source"], per_row)
    assert held[0] / held.sum() == pytest.approx(0.5, abs=0.003)
    assert data.tokens_trained(128) == pytest.approx(int(held.sum()), rel=1e-3)
    assert sum(batch["padding"] for batch in steps) == 128 * G - int(held.sum())
    rows = {row.source: row for row in data.epoch_table(128 * G)}
    assert rows["loose"].weight == pytest.approx(0.5, abs=0.003)
    assert rows["loose"].epochs == pytest.approx(int(held[1]) / 20_000, rel=1e-2)
    assert data.state_dict()["tokens"] == 0 and make(tmp_path / "d").packing == "cut"


def test_a_later_stage_packs_its_own_windows(numbered) -> None:
    path, documents = numbered
    data = attach(packed(path, stages=[Stage(2 * G, 4 * T, {"web": 1.0})], micro_batch_size=SAMPLES))
    batches = list(itertools.islice(data.train_dataloader(), 8))
    assert [batch["input_ids"].shape[1] for batch in batches] == [T, T] + [4 * T] * 6
    short = {int(d[0]): d for d in documents["web"] if T < len(d) <= 4 * T}  # whole now, cut before
    rows = [row for batch in batches[2:] for row in batch["input_ids"].tolist()]
    found = [d for d in short.values() if any(d[0] in row for row in rows)]
    assert len(found) > 5
    for document in found:
        row = next(row for row in rows if document[0] in row)
        at = row.index(document[0])
        assert row[at : at + len(document)] == document.tolist()


def test_validation_reads_the_same_windows_under_both(numbered) -> None:
    path, _ = numbered
    loaders = [attach(packed(path, packing=packing)).val_dataloader() for packing in ("cut", "best_fit")]
    for cut, best in zip(*loaders, strict=True):
        for a, b in zip(cut, best, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)


# -- loss


def test_the_loss_is_that_of_the_documents_without_padding(numbered) -> None:
    path, _ = numbered
    config = ModelConfig(vocab_size=load_manifest(path).vocab_size, d_model=32, n_layers=2, n_heads=2)
    with torch.device("meta"):
        model = Llama(config)
    materialize(model, config, 0, torch.device("cpu"))
    data = attach(packed(path, sequence_length=48, global_batch_tokens=48 * 4, weights={"web": 1}))
    batch = next(b for b in data.train_dataloader() if b["padding"] > 0 and (b["document_ids"] > 1).any())

    def total(ids: torch.Tensor, marks: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
        return model(ids, marks, labels).sum()

    together = total(batch["input_ids"], batch["document_ids"], batch["labels"])
    together.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    alone = torch.zeros(())
    for ids, marks, labels in zip(batch["input_ids"], batch["document_ids"], batch["labels"], strict=True):
        for number in range(int(marks.max()) + 1):
            piece = marks == number
            if (labels[piece] >= 0).any():
                alone = alone + total(ids[piece][None], None, labels[piece][None])
    alone.backward()
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)
    assert all(torch.allclose(a, p.grad, atol=1e-4) for a, p in zip(gradients, model.parameters(), strict=True))
    assert batch["loss_tokens"] == int((batch["labels"] >= 0).sum())


# -- the index


def test_the_packing_does_not_change_unnoticed() -> None:
    """A run resumes on windows that another version of this code made: new bytes need a new VERSION."""
    lengths = 1 + np.random.default_rng(7).geometric(0.01, 2000)
    index = _index_of(np.cumsum(lengths) - 1, Slice("web", 5, 400), 128)
    digest = hashlib.sha256(index.astype("<i8").tobytes()).hexdigest()
    assert (VERSION, digest[:16]) == (1, "947af151e9ca2763")


def test_the_index_is_made_once_and_known_by_its_key(numbered, tmp_path: Path) -> None:
    documents = {"train": numbered[1]["web"], "validation": numbered[1]["web"][:20]}
    write_folder(tmp_path / "d", {"web": documents}, 5000, shard_tokens=900)
    folder = tmp_path / "d" / "web" / "train"
    attach(packed(tmp_path / "d"))
    made = {path: path.read_bytes() for path in folder.glob("*.packed-*")}
    assert len(made) == len(list(folder.glob("*.bin"))) > 3 and not list(folder.glob(".*"))
    gone = sorted(made)[1]
    gone.unlink()  # as a pass that was interrupted leaves it: the others are taken as they are
    (folder / f".{gone.name}.{'0f' * 16}.tmp").write_bytes(b"half")
    kept = sorted(made)[0].stat().st_mtime_ns
    attach(packed(tmp_path / "d"))
    assert {path: path.read_bytes() for path in folder.glob("*.packed-*")} == made
    assert sorted(made)[0].stat().st_mtime_ns == kept and not list(folder.glob(".*"))
    attach(packed(tmp_path / "d", sequence_length=2 * T))
    attach(packed(tmp_path / "d", weights={"web[>=9]": 1}))
    assert len(list(folder.glob("*.packed-*"))) == 3 * len(made)
    gone.write_bytes(made[gone][:-8])
    with pytest.raises(DataError, match=r"is damaged .*; delete it"):
        attach(packed(tmp_path / "d"))
    # An index of damaged ends would be kept under the name of the sound ones.
    gone.unlink()
    ends = next(path for path in folder.glob("*.ends") if gone.name.startswith(path.stem))
    ends.write_bytes(ends.read_bytes()[:-8] + bytes(8))
    with pytest.raises(DataError, match=r"\.ends is not what was prepared"):
        attach(packed(tmp_path / "d"))
    assert not gone.exists()


def _open(path: Path, barrier) -> None:
    barrier.wait()
    PackedStream(load_manifest(path), "web", "train", 24)


def test_processes_that_start_together_make_one_index(numbered) -> None:
    path, _ = numbered
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    workers = [context.Process(target=_open, args=(path, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    folder = path / "web" / "train"
    assert not list(folder.glob(".*"))
    assert len(list(folder.glob("*.packed-24-*"))) == len(list(folder.glob("*.bin")))


def test_mistakes_are_one_line(numbered, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = numbered
    for changes, words in (
        ({"packing": "best"}, "packing must be one of cut, best_fit, got best"),
        ({"weights": {"nope": 1.0}}, "unknown source 'nope'"),
        ({"weights": {"nope[>=5]": 1.0}}, "unknown source"),
        ({"weights": {"web[>=999]": 1.0}}, "no document of such a length"),
    ):
        with pytest.raises(ConfigError, match=words):
            attach(packed(path, **changes))

    def refuse(*_) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lm.data.packing.write_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot write the index .*Permission denied; make it once where"):
        attach(packed(path, sequence_length=32))
