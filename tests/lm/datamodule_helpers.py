"""A small data folder, data modules on it, and a LightningModule that notes what it is given."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule

VOCAB, T, SAMPLES = 300, 16, 8
G = T * SAMPLES


def write_data(path: Path) -> None:
    """Three sources of random ids in several shards."""
    sources = {
        name: {
            "train": random_documents(n, VOCAB, 25, seed),
            "validation": random_documents(2000 + 300 * seed, VOCAB, 25, seed + 10),
        }
        for seed, (name, n) in enumerate((("prose", 30_000), ("code", 20_000), ("reference", 10_000)))
    }
    write_folder(path, sources, VOCAB, shard_tokens=4000)


def make(folder, **changes) -> TokenDataModule:
    settings = {"sequence_length": T, "global_batch_tokens": G, "seed": 5, **changes}
    return TokenDataModule(folder, **settings)


def attach(
    data: TokenDataModule,
    rank: int = 0,
    world_size: int = 1,
    step: int = 0,
    tensor_parallel: int = 1,
    max_steps: int = -1,
) -> TokenDataModule:
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=world_size,
        global_step=step,
        max_steps=max_steps,
        accumulate_grad_batches=1,
        lightning_module=None,
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        fit_loop=SimpleNamespace(restarting=False),
        strategy=SimpleNamespace(
            root_device=torch.device("cpu"), data_parallel=(rank // tensor_parallel, world_size // tensor_parallel)
        ),
    )
    data.setup("fit")
    return data


class Tiny(LightningModule):
    """Records the ids of every micro-batch and steps an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model_config = SimpleNamespace(vocab_size=VOCAB)
        self.table = torch.nn.Embedding(VOCAB, 2)
        self.seen: list[tuple[int, torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.global_step, batch["input_ids"].clone()))
        return self.table(batch["input_ids"]).square().sum() / batch["loss_tokens"]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def by_step(self) -> dict[int, torch.Tensor]:
        steps = sorted({step for step, _ in self.seen})
        return {step: torch.cat([ids for s, ids in self.seen if s == step]) for step in steps}


class SaveAt(Callback):
    def __init__(self, path, batches_done: int) -> None:
        self.path, self.batches_done = path, batches_done

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batches_done:
            trainer.save_checkpoint(self.path)


def fit(folder, max_steps, ckpt_path=None, callbacks=(), **changes):
    module, data = Tiny(), make(folder, **changes)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        val_check_interval=3,
        check_val_every_n_epoch=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return module, data, trainer
