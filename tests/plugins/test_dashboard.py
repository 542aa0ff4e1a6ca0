"""The dashboard's numbers against plain torch, and that looking changes nothing however the model is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback

from lm.config import ModelConfig, RuntimeConfig
from lm.errors import ConfigError
from lm.init import materialize
from lm.model import Llama
from plugins.callbacks.dashboard import Dashboard
from plugins.callbacks.forward_watch import ForwardWatch
from plugins.callbacks.stragglers import Stragglers
from plugins.callbacks.tally import Tally
from plugins.callbacks.update_watch import label_of
from tests.distributed.dashboard_jobs import OPTIM, train, write_data
from tests.distributed.scenario import CLIP, SINGLE


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("dashboard") / "data")


class Reference(Callback):
    """The same numbers for each step, in fp64, from weights, gradients and batches themselves."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self._batches: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._batches.append(batch)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        model = module.model
        self.weights = {name: p.detach().double() for name, p in model.named_parameters()}
        self.now = {}
        squares: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            squares[label_of(name)] = squares.get(label_of(name), 0) + parameter.grad.double().square().sum()
        self.now.update({f"grad_norm/{label}": float(square) ** 0.5 for label, square in squares.items()})
        self._forward(model, module.trainer.datamodule.source_names)

    @torch.no_grad()
    def _forward(self, model, sources):
        """All windows again, with hooks of its own."""
        batch = {key: torch.cat([b[key] for b in self._batches]) for key in ("input_ids", "labels", "source")}
        documents = torch.cat([b["document_ids"] for b in self._batches])
        self._batches = []
        seen: dict[str, Any] = {}
        hooks = [
            block.register_forward_hook(lambda m, i, out, n=f"block_{k:02d}": seen.update({n: out}))
            for k, block in enumerate(model.blocks)
        ]
        hooks.append(model.embedding.register_forward_hook(lambda m, i, out: seen.update(embedding=out)))
        logits = model(batch["input_ids"], documents).double()
        for hook in hooks:
            hook.remove()
        self.now.update({f"residual_rms/{k}": float(x.double().square().mean().sqrt()) for k, x in seen.items()})
        nll = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        labelled = batch["labels"] != -100
        for index, name in enumerate(sources):
            own = batch["source"] == index
            self.now[f"loss/{name}"] = float(nll[own].sum() / labelled[own].sum())
        self.now["loss"] = float(nll.sum() / labelled.sum())
        self.now["log_z"] = float(logits.logsumexp(-1)[labelled].mean())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        changes: dict[str, list] = {}
        for name, parameter in module.model.named_parameters():
            pair = changes.setdefault(label_of(name), [0.0, 0.0])
            pair[0] += (parameter.detach().double() - self.weights[name]).square().sum()
            pair[1] += self.weights[name].square().sum()
        self.now.update({f"update_ratio/{k}": float((new / old) ** 0.5) for k, (new, old) in changes.items()})
        optimizer = trainer.optimizers[0]
        moments = torch.cat([s["exp_avg_sq"].double().flatten() for s in optimizer.state.values()])
        corrected = moments.mean() / (1 - OPTIM.betas[1] ** trainer.global_step)
        self.now["eps_ratio"] = OPTIM.eps / float(corrected) ** 0.5
        self.now["clipped_fraction"] = float(trainer.strategy.grad_norm > CLIP)
        self.values.append(self.now)


def test_numbers_are_those_of_plain_torch(data: Path) -> None:
    reference, dashboard = Reference(), Dashboard(1)
    train(SINGLE, data, [dashboard, reference], 3)
    for step, wanted in enumerate(reference.values, start=1):
        assert len(wanted) == 19
        for key, value in wanted.items():
            assert dict(dashboard.history[key])[step] == pytest.approx(value, rel=2e-5), key
    parts = [dict(points)[1] for key, points in dashboard.history.items() if key.startswith("grad_norm/")]
    assert sum(part**2 for part in parts) ** 0.5 == pytest.approx(dict(dashboard.history["grad_norm"])[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_blocks_are_not_counted_twice(data: Path, kind: str) -> None:
    """Selective checkpointing hands out kept matrix products in order: an extra one would shift them all."""
    boards = {name: Dashboard(2, score_every=1) for name in (kind, "none")}
    losses = {
        name: train(SINGLE, data, [board], 4, runtime=RuntimeConfig(activation_checkpointing=name))
        for name, board in boards.items()
    }
    assert losses[kind] == losses["none"] == train(SINGLE, data, [], 4)
    for key in ("residual_rms/block_01", "attention_logit/block_01", "log_z", "update_ratio/block_00"):
        assert boards[kind].history[key] == boards["none"].history[key]


def graphs_while_watched(n_layers: int) -> int:
    """Compiled for all blocks over steps that are looked at in turn with steps that are not."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    config = ModelConfig(vocab_size=97, d_model=32, n_layers=n_layers, n_heads=2)
    with torch.device("meta"):
        model = Llama(config, RuntimeConfig(attention="sdpa"))
    for block in model.blocks:
        block.compile(backend="eager")
    materialize(model, config, 0, "cpu")
    watch, ids = ForwardWatch(model, 0), torch.arange(64).view(2, 32)
    for step in range(4):
        tally = Tally(watch.sums(), watch.maxima(), torch.device("cpu"))
        if step % 2:
            watch.install({}, tally, [0])
        model(ids, None, ids).mean().backward()
        watch.remove()
    assert min(tally["logit"].tolist()) > 0
    return counters["stats"]["unique_graphs"]


def test_compiled_blocks_stay_one_and_the_same() -> None:
    """Ten layers need no more graphs than two, and a watched step is compiled once."""
    assert graphs_while_watched(10) == graphs_while_watched(2) <= 5


def test_history_goes_on_after_a_restart_and_is_bounded(data: Path, tmp_path: Path) -> None:
    from tests.distributed.scenario import SaveAt

    whole, restarted = Dashboard(1, history_length=3), Dashboard(1, history_length=3)
    path = tmp_path / "step-00000002"
    train(SINGLE, data, [whole, SaveAt(2, path)], 4)
    train(SINGLE, data, [restarted], 4, ckpt_path=path)
    assert [step for step, _ in whole.history["log_z"]] == [2, 3, 4]
    for key in ("log_z", "loss/prose", "update_ratio/head"):
        assert restarted.history[key] == whole.history[key]


def test_a_branch_that_was_rolled_back_leaves_the_history() -> None:
    dashboard = Dashboard()
    for step, value in ((10, 1.0), (20, 2.0), (30, 9.0), (20, 2.5), (30, float("inf"))):
        dashboard._remember(step, {"log_z": value})
    assert list(dashboard.history["log_z"]) == [(10, 1.0), (20, 2.5)]


def test_stragglers() -> None:
    """Named after `patience` times in a row, and again after as many; one quick step begins the count anew."""
    stragglers = Stragglers(1.5, 2)
    assert [stragglers.see([1, 2, 1, 1]) for _ in range(4)] == [[], [1], [], [1]]
    assert stragglers.see([1, 1, 1, 1.4]) == []
    assert [stragglers.see([1, 2]), stragglers.see([1, 2])] == [[], [1]]
    assert [stragglers.see([1.0]) for _ in range(9)] == [[]] * 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"every_n_steps": 0}, "every_n_steps"), ({"straggler_factor": 1}, "above 1"), ({"peak_tflops": 0}, "above 0")],
)
def test_bad_use_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Dashboard(**arguments)


def test_mfu_is_flops_over_the_given_peak(data: Path) -> None:
    from lm.plan import flops_per_token
    from tests.distributed.dashboard_jobs import LENGTH, SHAPE, WINDOWS

    dashboard = Dashboard(2, peak_tflops=0.01)
    train(SINGLE, data, [dashboard], 4)
    for step, mfu in dashboard.history["mfu"]:
        seconds = dict(dashboard.history["step_seconds/rank_0"])[step]
        assert mfu == pytest.approx(WINDOWS * LENGTH * flops_per_token(SHAPE, LENGTH) / seconds / 1e10)
