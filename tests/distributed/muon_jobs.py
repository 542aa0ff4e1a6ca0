"""What the processes of test_muon do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm.optim.build import make_optimizer
from lm.optim.config import MuonConfig, OptimConfig
from tests.distributed.scenario import Layout, Model, SaveAt, build_trainer, fit

STEPS, SAVED_STEP = 8, 4
OPTIM = OptimConfig(name="muon", lr=4e-3, eps=1e-6, muon=MuonConfig(ns_dtype="float32"))


class MuonModel(Model):
    def configure_optimizers(self):
        return make_optimizer(self.model, self.config, OPTIM)


def train(layout: Layout, folder: Path) -> dict[str, Any]:
    """STEPS steps with a checkpoint of step SAVED_STEP, then its second half again from there."""
    path = folder / layout.name
    whole = fit(build_trainer(layout, STEPS, callbacks=[SaveAt(SAVED_STEP, path)]), MuonModel())
    return {"losses": whole.losses, "norms": whole.norms, "resumed": resume(layout, path)}


def resume(layout: Layout, path: Path) -> list[float]:
    return fit(build_trainer(layout, STEPS), MuonModel(), path).losses


def resume_crossings(pairs: list[tuple[Path, Layout]]) -> list[list[float]]:
    """Each checkpoint continued under its layout, one after the other in the same processes."""
    return [resume(layout, path) for path, layout in pairs]
