"""Step 1,000 of a real run, reached by one process, holds the ids that other processes resume with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule
from tests.distributed import harness
from tests.distributed.scenario import Layout, build_strategy, quiet

STEP = 1000
VOCAB, LENGTH, SEQUENCES = 300, 16, 8


class Reader(LightningModule):
    """Trains a table of 600 numbers and keeps the ids of the steps from `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.model: torch.nn.Embedding | None = None
        self.ids: dict[int, list[torch.Tensor]] = {}

    def configure_model(self) -> None:
        self.model = self.model or torch.nn.Embedding(VOCAB, 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step >= self.first:
            self.ids.setdefault(self.global_step, []).append(batch["input_ids"])
        assert self.model is not None
        return self.model(batch["input_ids"]).square().sum() / batch["loss_tokens"]


def read(
    layout: Layout,
    data: Path,
    micro: int,
    workers: int,
    start: Path | None,
    save: Path | None,
    packing: str = "cut",
    step: int = STEP,
) -> dict[int, Any]:
    """This rank's ids by step from `step` on, as lists; saves after step `step` - 1 is done where asked."""
    quiet()
    module = Reader(step)
    trainer = Trainer(
        accelerator="cpu",
        devices=layout.world_size,
        strategy=build_strategy(layout),
        max_steps=step if save else step + 3,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    source = TokenDataModule(
        str(data),
        sequence_length=LENGTH,
        global_batch_tokens=LENGTH * SEQUENCES,
        micro_batch_size=micro,
        num_workers=workers,
        seed=3,
        packing=packing,
    )
    trainer.fit(module, datamodule=source, ckpt_path=start)
    if save:
        trainer.save_checkpoint(save)
    return {step: torch.cat(parts).tolist() for step, parts in module.ids.items()}


@pytest.fixture(scope="module")
def reached(tmp_path_factory) -> tuple[Path, Path, dict[int, Any]]:
    """Data folder, checkpoint after 1,000 steps of one process, and the ids of the steps after it without a stop."""
    folder = tmp_path_factory.mktemp("stream")
    documents = {
        "train": random_documents(40_000, VOCAB, 25, 0),
        "validation": random_documents(2_000, VOCAB, 25, 1),
    }
    write_folder(folder / "data", {"prose": documents, "code": documents}, VOCAB)
    single = Layout("single", 1)
    harness.run(read, 1, single, folder / "data", SEQUENCES, 0, None, folder / "saved")
    whole = harness.run(read, 1, single, folder / "data", SEQUENCES, 0, None, None)[0]
    assert sorted(whole) == [1000, 1001, 1002]
    return folder / "data", folder / "saved", whole


@pytest.mark.parametrize(("processes", "micro", "workers"), [(1, 2, 0), (2, 4, 0), (2, 1, 2), (4, 2, 0), (4, 1, 1)])
def test_ids_of_step_1000_are_the_same(reached, processes: int, micro: int, workers: int) -> None:
    data, saved, whole = reached
    layout = Layout("single", 1) if processes == 1 else Layout("ddp", processes)
    ranks = harness.run(read, processes, layout, data, micro, workers, saved, None)
    for step, ids in whole.items():
        assert [row for rank in ranks for row in rank[step]] == ids


def test_packed_ids_are_the_same(reached, tmp_path: Path) -> None:
    """The same under best-fit packing, after 40 steps; the processes of a layout make the index together."""
    data, _, _ = reached
    single = Layout("single", 1)
    harness.run(read, 1, single, data, SEQUENCES, 0, None, tmp_path / "saved", "best_fit", 40)
    whole = harness.run(read, 1, single, data, SEQUENCES, 0, None, None, "best_fit", 40)[0]
    assert sorted(whole) == [40, 41, 42]
    for processes, micro, workers in ((2, 1, 2), (4, 2, 0)):
        for index in data.rglob("*.packed-*"):
            index.unlink()
        ranks = harness.run(
            read, processes, Layout("ddp", processes), data, micro, workers, tmp_path / "saved", None, "best_fit", 40
        )
        for step, ids in whole.items():
            assert [row for rank in ranks for row in rank[step]] == ids
