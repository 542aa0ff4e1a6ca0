"""The data module: the same stream on any layout and after any resume, exact loss weights, validation, errors."""

import itertools
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lm.data.plan import Stage
from lm.data.synthetic import write_folder
from lm.data.windows import NO_LABEL
from lm.datamodule import TokenDataModule
from tests.lm.datamodule_helpers import SAMPLES, VOCAB, G, T, Tiny, attach, make

ROOT = Path(__file__).resolve().parents[2]


def global_batch(folder, step: int, world_size: int, **changes) -> torch.Tensor:
    """input_ids of one step, put together from all ranks and micro-batches; [S, T]."""
    parts = []
    for rank in range(world_size):
        data = attach(make(folder, **changes), rank, world_size, step)
        batches = list(itertools.islice(data.train_dataloader(), data.accumulate))
        parts += [batch["input_ids"] for batch in batches]
    return torch.cat(parts)


# -- the stream -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1000])
def test_step_has_the_same_ids_on_any_layout(folder, step) -> None:
    expected = global_batch(folder, step, 1)
    assert expected.shape == (SAMPLES, T)
    for world_size in (1, 2, 4):
        for micro in (1, 2):
            assert torch.equal(global_batch(folder, step, world_size, micro_batch_size=micro), expected)
    for num_workers in (1, 2):
        assert torch.equal(global_batch(folder, step, 2, micro_batch_size=1, num_workers=num_workers), expected)


def test_step_1000_reached_and_jumped_to_are_the_same(folder) -> None:
    reached = next(itertools.islice(attach(make(folder)).train_dataloader(), 1000, None))
    assert torch.equal(reached["input_ids"], global_batch(folder, 1000, 4, micro_batch_size=1))


def test_workers_keep_the_exact_order_of_micro_batches(folder) -> None:
    streams = [
        itertools.islice(attach(make(folder, micro_batch_size=2, num_workers=n), step=7).train_dataloader(), 40)
        for n in (0, 1, 2)
    ]
    for batches in zip(*streams, strict=True):
        for other in batches[1:]:
            assert batches[0].keys() == other.keys()
            for key, value in batches[0].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


HOLDS = """
import sys
from lm.datamodule import TokenDataModule
from tests.lm.datamodule_helpers import attach, make
batches = iter(attach(make(sys.argv[1], num_workers=2)).train_dataloader())
next(batches)
"""


def test_a_script_that_ends_with_an_iterator_in_hand_ends(folder) -> None:
    """Workers outlive SIGTERM, with which multiprocessing would end them."""
    done = subprocess.run([sys.executable, "-c", HOLDS, str(folder)], timeout=60, cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_spawned_workers_are_sent_paths_not_ids(folder) -> None:
    stream = attach(make(folder), step=3).train_dataloader().stream
    data = pickle.dumps(stream)
    assert len(data) < 60_000
    assert torch.equal(next(iter(pickle.loads(data)))["input_ids"], next(iter(stream))["input_ids"])


def test_iterating_leaves_global_random_state_alone(folder) -> None:
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    next(iter(attach(make(folder)).train_dataloader()))
    for loader in attach(make(folder)).val_dataloader():
        list(loader)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_batch_has_the_promised_types(folder) -> None:
    batch = next(iter(attach(make(folder, micro_batch_size=4)).train_dataloader()))
    types = {key: (value.dtype, tuple(value.shape)) for key, value in batch.items() if torch.is_tensor(value)}
    assert types == {
        "input_ids": (torch.int64, (4, T)),
        "labels": (torch.int64, (4, T)),
        "document_ids": (torch.int32, (4, T)),
        "source": (torch.int64, (4,)),
    }
    assert isinstance(batch["loss_tokens"], float)


def test_weights_set_the_mix(folder) -> None:
    data = attach(make(folder, weights={"code": 3, "prose": 1}))
    assert data.source_weights == {"code": 0.75, "prose": 0.25}
    batches = itertools.islice(data.train_dataloader(), 1024 // SAMPLES)
    counts = torch.bincount(torch.cat([batch["source"] for batch in batches]), minlength=3)
    assert dict(zip(data.source_names, counts.tolist(), strict=True)) == {"prose": 256, "code": 768, "reference": 0}
    proportional = attach(make(folder)).source_weights
    assert proportional["prose"] == pytest.approx(0.5)


# -- loss weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_loss_is_the_mean_over_the_global_batch(folder, world_size, micro) -> None:
    """Mean over ranks and micro-batches of sum(nll) / loss_tokens, with a different nll for every token."""
    nll = torch.rand(VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    terms, labels = [], []
    for rank in range(world_size):
        data = attach(make(folder, micro_batch_size=micro), rank, world_size, step=3)
        for batch in itertools.islice(data.train_dataloader(), data.accumulate):
            kept = batch["labels"][batch["labels"] != NO_LABEL]
            terms.append(nll[kept].sum() / batch["loss_tokens"])
            labels.append(kept)
    assert torch.stack(terms).mean().item() == pytest.approx(nll[torch.cat(labels)].mean().item(), rel=1e-12)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("micro", [1, None])
def test_ten_tokens_at_4_and_ninety_at_2_give_2_2(tmp_path, world_size, micro) -> None:
    """Window 0 has 10 labels (90 inputs are document ends), window 1 has 90: per-batch means would give 3.0."""
    few, many = np.full(100, 0), np.full(100, 7)
    few[:10], many[::10] = 5, 0
    stream = np.concatenate([few, many, [0]])
    documents = [part for part in np.split(stream, np.flatnonzero(stream == 0) + 1) if len(part)]
    write_folder(tmp_path / "d", {"s": {"train": documents, "validation": documents}}, VOCAB)
    terms, counts = [], []
    for rank in range(world_size):
        data = attach(TokenDataModule(str(tmp_path / "d"), 100, 200, micro), rank, world_size)
        assert data.order.locate(data.order.step_samples(0))[1].tolist() in ([0, 1], [1, 0])  # an epoch is one step
        for batch in itertools.islice(data.train_dataloader(), data.accumulate):
            inputs, labels = batch["input_ids"], batch["labels"]
            nll = torch.where(inputs == 5, 4.0, 2.0)[labels != NO_LABEL].sum()
            counts.append(int((labels != NO_LABEL).sum()))
            terms.append(nll / batch["loss_tokens"])
    assert sum(counts) == 100
    assert torch.stack(terms).mean().item() == pytest.approx(2.2)


# -- stages and skipped ranges ----------------------------------------------------------------------------------


def test_stages_change_length_and_mix_at_their_step(folder) -> None:
    stages = [Stage(4 * G, 2 * T, {"code": 1.0})]
    data = attach(make(folder, micro_batch_size=2, stages=stages))
    batches = list(itertools.islice(data.train_dataloader(), 8 * data.accumulate))
    assert data.accumulate == 4
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, T)] * 16 + [(1, 2 * T)] * 16
    assert {int(s) for batch in batches[16:] for s in batch["source"]} == {1}
    late = next(iter(attach(make(folder, micro_batch_size=2, stages=stages), step=5).train_dataloader()))
    assert torch.equal(late["input_ids"], batches[20]["input_ids"])


def test_a_callback_can_add_a_stage_after_setup(folder) -> None:
    data = attach(make(folder, micro_batch_size=1))
    with pytest.raises(ValueError, match=r"stage 1 has 4 windows .* cannot share"):
        data.add_stage(Stage(4 * G, 2 * T, {"code": 1.0}))
    data = attach(make(folder, micro_batch_size=2))
    data.add_stage(Stage(4 * G, 2 * T, {"code": 1.0}))
    batch = next(itertools.islice(data.train_dataloader(), 16, None))
    assert batch["input_ids"].shape == (1, 2 * T)


def test_skipped_samples_never_come(folder) -> None:
    plain = [batch["input_ids"] for batch in itertools.islice(attach(make(folder)).train_dataloader(), 10)]
    data = attach(make(folder), step=3)
    data.skip_samples([(3 * SAMPLES, 5 * SAMPLES)])
    after = [batch["input_ids"] for batch in itertools.islice(data.train_dataloader(), 5)]
    assert all(torch.equal(a, b) for a, b in zip(after, plain[5:], strict=True))
    state = data.state_dict()
    assert state["skipped"] == [[24, 40]] and state["samples"] == 40 and state["step"] == 3
    resumed = attach(make(folder), step=4)
    resumed.load_state_dict(state)
    assert torch.equal(next(iter(resumed.train_dataloader()))["input_ids"], plain[6])


# -- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        ({"weights": {"nope": 1}}, 1, "unknown source 'nope' in weights; prepared sources: prose, code, reference"),
        ({"global_batch_tokens": 100}, 1, "not a multiple of sequence_length 16; the nearest that works is 96"),
        ({"sequence_length": 2**15, "global_batch_tokens": 2**15}, 1, "sequence_length 32768 is longer than the"),
        ({}, 3, "8 windows .* which 3 processes cannot share; process counts that work: 1, 2, 4, 8"),
        ({"micro_batch_size": 3}, 2, "micro_batch_size 3 does not divide the 4 windows .* values that work: 1, 2, 4"),
        ({"micro_batch_size": 8}, 2, "micro_batch_size 8 does not divide .* with it, process counts: 1"),
        ({"micro_batch_size": 0}, 1, "micro_batch_size 0 does not divide"),
    ],
)
def test_bad_settings_are_one_line(folder, changes, world_size, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        attach(make(folder, **changes), 0, world_size)
    assert "\n" not in str(caught.value)


def test_wrong_vocabulary_is_one_line(folder) -> None:
    module = Tiny()
    module.model_config.vocab_size = 512
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"vocab_size is 512 but .* was tokenized with 300; set it to that"):
        trainer.fit(module, datamodule=make(folder))


def test_missing_folder_and_short_validation(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="is not a prepared data folder"):
        attach(make(str(tmp_path)))
    data = attach(make(folder, sequence_length=4096, global_batch_tokens=4096))
    with pytest.raises(ValueError, match="longer than the validation split of source 'prose'"):
        data.val_dataloader()


def test_bytes_are_not_counted_by_another_tokenizer(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path / "d")
    (tmp_path / "d" / "tokenizer.json").write_text((tmp_path / "d" / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ValueError, match=r"tokenizer.json is not what was prepared"):
        attach(make(str(tmp_path / "d"))).val_dataloader()


def test_epoch_table_and_warning(folder) -> None:
    data = attach(make(folder, weights={"reference": 1}))
    row = next(row for row in data.epoch_table(50_000) if row.source == "reference")
    assert (row.unique_tokens, row.weight, row.tokens_drawn) == (10_000, 1.0, 50_000)
    assert row.epochs == pytest.approx(50_000 / (9_999 // T * T))
    data.trainer.max_steps = 400
    with pytest.warns(UserWarning, match=r"source 'reference' is repeated 5\.1 times"):
        data.train_dataloader()


def test_ranks_of_a_tensor_group_read_the_same_samples(folder) -> None:
    def first(rank: int, world_size: int, tensor_parallel: int) -> torch.Tensor:
        data = attach(make(folder), rank, world_size, tensor_parallel=tensor_parallel)
        return next(iter(data.train_dataloader()))["input_ids"]

    for rank in range(4):
        assert torch.equal(first(rank, 4, 2), first(rank // 2, 2, 1))
    assert not torch.equal(first(0, 4, 2), first(2, 4, 2))
