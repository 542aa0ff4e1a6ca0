"""A run at a rate that drives attention scores up, with and without QK-clip."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from lightning.pytorch import Callback

from plugins.callbacks.qk_clip import QKClip
from tests.distributed.scenario import CONFIG, Layout, Model, build_trainer, fit

STEPS, THRESHOLD = 24, 1.0
WIDE_INIT = dataclasses.replace(CONFIG, init_std=0.15)


class FastModel(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1.5e-2, betas=(0.9, 0.95), eps=1e-6)


class Note(Callback):
    """The largest score of each step, as the clip before it in the list saw it."""

    def __init__(self, clip: QKClip):
        self.clip, self.scores = clip, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.scores.append(float(self.clip.largest.max()))


def run(layout: Layout, threshold: float) -> dict[str, Any]:
    clip = QKClip(threshold)
    note = Note(clip)
    module = fit(build_trainer(layout, STEPS, callbacks=[clip, note]), FastModel(WIDE_INIT))
    return {"scores": note.scores, "losses": module.losses, "clipped_steps": clip.clipped_steps}


def train(layout: Layout, free: bool = True) -> dict[str, Any]:
    clipped = run(layout, THRESHOLD)
    return {**clipped, "free": run(layout, 1e9)["scores"]} if free else clipped
