"""The model's stabilisers and ways of computing under the strategies: the same losses as one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lm.config import RuntimeConfig
from lm.init import materialize
from lm.loss import IGNORE
from lm.model import Llama
from tests.distributed import harness
from tests.distributed.scenario import CONFIG, LAYOUTS, SINGLE, Layout, Model, build_trainer, fit

STEPS = 5
OPTIONS = dataclasses.replace(CONFIG, qk_norm=True, attention_softcap=4.0, final_softcap=8.0)
SOME = [layout for layout in LAYOUTS if layout.name in ("ddp-2", "fsdp-2", "zero1-2", "zero3-2")]
RECOMPUTE = ("none", "full", "selective")


class Stabilised(Model):
    """QK-norm, both soft-caps, a z-loss and two documents a window, computed in the given way."""

    def __init__(self, runtime: RuntimeConfig):
        super().__init__(OPTIONS)
        self.runtime = runtime

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            model = Llama(self.config, self.runtime)
        self.trainer.strategy.parallelize(model)
        materialize(model, self.config, 7, self.trainer.strategy.root_device)
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        documents = (torch.arange(batch["labels"].shape[1]) // 5).expand_as(batch["labels"])
        nll, logsumexp = self.model(batch["input_ids"], documents, batch["labels"], with_logsumexp=True)
        counted = batch["labels"] != IGNORE
        loss = (nll + 0.01 * logsumexp.square() * counted).sum() / batch["loss_tokens"]
        self.step_loss = self.step_loss + loss.detach() / self.trainer.accumulate_grad_batches
        return loss


def train(layout: Layout, runtimes: list[RuntimeConfig]) -> list[dict[str, list[float]]]:
    modules = [fit(build_trainer(layout, STEPS), Stabilised(runtime)) for runtime in runtimes]
    return [{"losses": module.losses, "norms": module.norms} for module in modules]


@pytest.fixture(scope="module")
def reference() -> dict[str, list[float]]:
    return harness.run(train, 1, SINGLE, [RuntimeConfig(attention="sdpa")])[0][0]


@pytest.mark.parametrize("layout", SOME, ids=lambda layout: layout.name)
def test_stabilised_runs_equal_one_process(reference, layout: Layout) -> None:
    runtimes = [RuntimeConfig("documents", activation_checkpointing=kind) for kind in RECOMPUTE]
    for got in harness.run(train, layout.world_size, layout, runtimes)[0]:
        assert got["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(reference["norms"], rel=1e-5)
    assert len(set(reference["losses"])) == STEPS
