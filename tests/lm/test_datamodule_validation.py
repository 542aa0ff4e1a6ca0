"""Validation windows: each counted once on any number of ranks, spread over the split, with their labels' bytes."""

import numpy as np
import torch

from lm.data.windows import NO_LABEL
from tests.lm.datamodule_helpers import VOCAB, G, attach, make


def validation(folder, world_size: int, **changes):
    """Per source: rows (ids, labels, target_bytes) of all ranks that have a label, and batches of each rank."""
    rows, n_batches = [[], [], []], [set(), set(), set()]
    for rank in range(world_size):
        data = attach(make(folder, **changes), rank, world_size)
        for index, loader in enumerate(data.val_dataloader()):
            batches = list(loader)
            n_batches[index].add((len(batches), len(loader), batches[0]["input_ids"].shape[0]))
            for batch in batches:
                assert len({batch[key].shape[0] for key in ("input_ids", "labels", "target_bytes", "source")}) == 1
                for i in range(len(batch["labels"])):
                    if (batch["labels"][i] != NO_LABEL).any():
                        row = [batch[key][i].tolist() for key in ("input_ids", "labels", "target_bytes")]
                        rows[index].append(row)
                    else:
                        assert batch["target_bytes"][i] == 0
    return [sorted(part) for part in rows], n_batches


def test_validation_counts_every_window_once_on_any_number_of_ranks(folder) -> None:
    expected, _ = validation(folder, 1, validation_windows=50)
    assert [len(rows) for rows in expected] == [50, 50, 50]
    for world_size in (2, 3, 4):
        rows, n_batches = validation(folder, world_size, validation_windows=50, global_batch_tokens=12 * G)
        assert rows == expected
        assert all(len(kinds) == 1 for kinds in n_batches)  # every rank runs the same number of equal batches
    again, _ = validation(folder, 2, validation_windows=50, validation_batch_size=7)
    assert again == expected


def test_validation_windows_spread_over_the_whole_split(folder) -> None:
    data = attach(make(folder, validation_windows=40))
    for loader in data.val_dataloader():
        windows = loader.dataset.windows
        assert len(np.unique(windows)) == 40 and windows[0] < 20 and windows[-1] > 105
    everything = attach(make(folder, validation_windows=10**6))
    assert [len(loader.dataset.windows) for loader in everything.val_dataloader()] == [124, 143, 162]


def test_target_bytes_are_those_of_the_labels(folder) -> None:
    """In the synthetic tokenizer ids 1 to 256 are one byte, end-of-text none."""
    data = attach(make(folder))
    for loader in data.val_dataloader():
        for batch in loader:
            labels = batch["labels"]
            names = np.array([len(f"unused{i}") if i > 256 else int(i > 0) for i in range(VOCAB)])
            expected = [names[row[row != NO_LABEL].numpy()].sum() for row in labels]
            assert batch["target_bytes"].tolist() == expected
            assert batch["target_bytes"].dtype == torch.int64


def test_resume_at_step_one_million_takes_under_a_second(folder) -> None:
    import time

    data = attach(make(folder), step=1_000_000)
    start = time.perf_counter()
    next(iter(data.train_dataloader()))
    assert time.perf_counter() - start < 1
