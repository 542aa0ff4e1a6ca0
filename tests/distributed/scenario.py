"""A small training run that every strategy can do, and what is recorded of it.

Width and vocabulary divide by nothing the world sizes are made of (heads and MLP by 2, for tensor parallelism), the
optimizer has two groups, clipping bites, gradients are accumulated, and label counts differ between ranks, so that a
mean of means would show.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lm.config import ModelConfig
from lm.init import materialize, parameter_kind
from lm.model import Llama
from plugins.strategies import register, state

CONFIG = ModelConfig(vocab_size=131, d_model=25, n_layers=2, n_heads=6, n_kv_heads=2, d_head=4, d_ff=38)
SEQUENCES, LENGTH = 8, 13  # of the global batch
CLIP = 0.5


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of processes. `arguments` go to the class, for what has no name in the registry."""

    strategy: str
    world_size: int
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or f"{self.strategy}-{self.world_size}"


SINGLE = Layout("single", 1)
LAYOUTS = [
    SINGLE,
    Layout("ddp", 2),
    Layout("fsdp", 2),
    Layout("fsdp", 4),
    Layout("hsdp", 4, {"replicate": 2, "shard": 2}),
    Layout("zero1", 2),
    Layout("zero2", 2),
    Layout("zero3", 2),
]  # of the table of resumes in docs/strategies.md
TENSOR_LAYOUTS = [
    Layout("fsdp", 2, {"tensor_parallel": 2}, "tp2"),
    Layout("fsdp", 4, {"tensor_parallel": 2}, "fsdp2_tp2"),
]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels), each [SEQUENCES, LENGTH], of an optimizer step; about a third of the labels is -100."""
    generator = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(0, CONFIG.vocab_size, (SEQUENCES, 1), generator=generator)
    tokens = (starts + 5 * torch.arange(LENGTH + 1)) % CONFIG.vocab_size  # something that can be learnt
    labels = tokens[:, 1:].clone()
    drop = torch.rand(labels.shape, generator=generator) < torch.linspace(0, 0.7, SEQUENCES)[:, None]
    labels[drop] = -100
    return tokens[:, :-1], labels


class Stream(IterableDataset):
    """This rank's micro-batches from the trainer's present step on."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def __iter__(self):
        trainer, step = self.trainer, self.trainer.global_step
        rank, ranks = trainer.strategy.data_parallel
        parts = ranks * trainer.accumulate_grad_batches
        rows = SEQUENCES // parts
        while True:
            input_ids, labels = batch_of(step)
            loss_tokens = float((labels >= 0).sum()) / parts
            for micro in range(trainer.accumulate_grad_batches):
                start = (rank * trainer.accumulate_grad_batches + micro) * rows
                own = slice(start, start + rows)
                yield {"input_ids": input_ids[own], "labels": labels[own], "loss_tokens": loss_tokens}
            step += 1


class Model(LightningModule):
    """The least a LightningModule needs for these strategies."""

    def __init__(self, config: ModelConfig = CONFIG):
        super().__init__()
        self.config = config
        self.model: Llama | None = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.validation_losses: list[float] = []
        self.step_loss: Any = 0.0

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            model = Llama(self.config)
        self.trainer.strategy.parallelize(model)
        materialize(model, self.config, 7, self.trainer.strategy.root_device)
        self.model = model

    def configure_optimizers(self):
        hidden, other = [], []
        for name, parameter in self.model.named_parameters():
            (hidden if parameter_kind(name) == "hidden" else other).append(parameter)
        groups = [{"params": hidden, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0, "lr": 4e-3}]
        # eps: a gradient that is zero but for rounding would else become a step of full size, of random sign.
        optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-6)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.05 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch, batch_idx):
        nll = self.model(batch["input_ids"], None, batch["labels"])
        loss = nll.sum() / batch["loss_tokens"]
        self.step_loss = self.step_loss + loss.detach() / self.trainer.accumulate_grad_batches
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.losses.append(float(self.trainer.strategy.reduce(self.step_loss, reduce_op="mean")))
            self.norms.append(float(self.trainer.strategy.grad_norm))
            self.step_loss = 0.0

    def validation_step(self, batch, batch_idx):
        nll = self.model(batch["input_ids"], None, batch["labels"])
        self.validation_losses.append(float(self.trainer.strategy.reduce(nll.mean(), reduce_op="mean")))


class SaveAt(Callback):
    """Saves one checkpoint after the given optimizer step."""

    def __init__(self, step: int, path: Path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.path)


class SaveAfterValidation(SaveAt):
    """Saves when the validation after the given step is over: parameters may still be gathered from it."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        pass

    def on_validation_end(self, trainer, module):
        if trainer.global_step == self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


def build_strategy(layout: Layout) -> Any:
    """A name for the registry, or an object where the layout has arguments."""
    register()
    if not layout.arguments:
        return layout.strategy
    from plugins.strategies.ddp import DDP
    from plugins.strategies.deepspeed import ZeRO
    from plugins.strategies.fsdp import FSDP
    from plugins.strategies.hsdp import HSDP

    return {"ddp": DDP, "fsdp": FSDP, "hsdp": HSDP, "zero": ZeRO}[layout.strategy](**layout.arguments)


def build_trainer(layout: Layout, steps: int, *, accumulate: int = 2, **options: Any) -> Trainer:
    """A quiet Trainer on the CPU."""
    quiet()
    return Trainer(
        accelerator="cpu",
        devices=layout.world_size,
        strategy=build_strategy(layout),
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=options.pop("gradient_clip_val", CLIP),
        logger=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(trainer: Trainer, module: Model, ckpt_path: Path | None = None, validate: bool = False) -> Model:
    """Train from the start or from a checkpoint to the trainer's max_steps."""
    train, validation = (DataLoader(Stream(trainer), batch_size=None) for _ in range(2))
    trainer.fit(module, train, validation if validate else None, ckpt_path=ckpt_path)
    return module


def snapshot(strategy: Any) -> dict[str, str]:
    """A hash of each tensor and each other part of model and optimizer, whole, the same for equal bits. Collective."""
    tensors, optimizer = strategy.collect(with_optimizer=True)
    hashes = {}
    for key, value in tensors.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        hashes[key] = hashlib.sha256(whole.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
    for name, scalars in optimizer["scalars"].items():
        hashes.update({f"{name}/{key}": repr(float(value)) for key, value in scalars.items()})
    return hashes


def shapes(module: Model) -> dict[str, tuple[int, ...]]:
    """Whole shapes of the parameters by checkpoint name."""
    return {name: tuple(state.shape_of(parameter)) for name, parameter in state.named_parameters(module).items()}


def quiet() -> None:
    """Lightning, DeepSpeed and torch say little."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
