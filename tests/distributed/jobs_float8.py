"""What runs inside the processes of tests/plugins/test_float8.py."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lm.config import ModelConfig
from lm.module import LlamaModule
from lm.optim.config import OptimConfig
from lm.optim.schedule import ScheduleConfig
from plugins.precision.float8 import Float8
from plugins.strategies import register
from tests.distributed.scenario import quiet

CONFIG = ModelConfig(vocab_size=131, d_model=32, n_layers=2, n_heads=2, d_ff=64)
LENGTH, SEQUENCES = 32, 8


def batches(rank: int, world: int) -> Any:
    """This rank's windows of an endless stream: arithmetic progressions modulo the vocabulary, which can be learnt."""
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, 131, (SEQUENCES, 1), generator=generator)
        tokens = (starts + 5 * torch.arange(LENGTH + 1)) % 131
        own = tokens[rank::world]
        documents = torch.zeros_like(own[:, 1:])
        yield {
            "input_ids": own[:, :-1],
            "document_ids": documents,
            "labels": own[:, 1:],
            "loss_tokens": float(own[:, 1:].numel()),
        }


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def __iter__(self) -> Any:
        return batches(self.trainer.global_rank, self.trainer.world_size)


class Recorded(LlamaModule):
    """Keeps the loss of every step."""

    def record(self, values: dict[str, float]) -> None:
        self.losses = [*getattr(self, "losses", []), values["loss"]]


def train(
    fp8: bool, steps: int, strategy: str = "single", devices: int = 1, save: str = ""
) -> tuple[list[float], LlamaModule]:
    """Losses of each step, and the module."""
    quiet()
    register()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **({"plugins": [Float8(emulate=True)]} if fp8 else {"precision": "bf16-mixed"}),
    )
    module = Recorded(CONFIG, OptimConfig(lr=6e-3, schedule=ScheduleConfig(warmup_steps=5)), seed=1)
    trainer.fit(module, torch.utils.data.DataLoader(Stream(trainer), batch_size=None))
    if save:
        trainer.save_checkpoint(save)
    return module.losses, module


def fsdp_losses(steps: int) -> tuple[list[float], set[str]]:
    losses, module = train(True, steps, "fsdp", 2)
    return losses, {type(layer).__name__ for block in module.model.blocks for layer in block.mlp.children()}
