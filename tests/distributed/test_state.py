"""What is restored, what the configuration keeps, and what is refused; one process, no launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from plugins.strategies import checkpoint, checkpoint_io
from plugins.strategies.checkpoint import CheckpointError
from tests.distributed.scenario import CONFIG, SINGLE, Model, SaveAt, build_trainer, fit


class OtherDecay(Model):
    def configure_optimizers(self):
        configured = super().configure_optimizers()
        configured["optimizer"].param_groups[0]["weight_decay"] = 0.3
        return configured


class Momentum(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OneGroup(Model):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("state") / "step-00000003"
    fit(build_trainer(SINGLE, 3, callbacks=[SaveAt(3, path)]), Model())
    return path


def test_the_rest_loads_with_weights_only_and_holds_groups_by_name(saved) -> None:
    rest = torch.load(saved / "state.pt", weights_only=True)
    assert rest["global_step"] == 3
    optimizer = rest["optimizer"]
    assert optimizer["class"] == "AdamW"
    assert [group["weight_decay"] for group in optimizer["groups"]] == [0.1, 0.0]
    assert "model.blocks.0.mlp.w_up.weight" in optimizer["groups"][0]["names"]
    assert float(optimizer["scalars"]["model.norm.weight"]["step"]) == 3


def test_rate_is_restored_and_the_configured_decay_holds(saved) -> None:
    trainer = build_trainer(SINGLE, 3)  # as many steps as are done: nothing is trained
    fit(trainer, OtherDecay(), saved)
    group = trainer.strategy.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(2e-3 / (1 + 0.05 * 3))
    assert group["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Momentum(), "state of AdamW, this run optimizes with SGD"),
        (lambda: OneGroup(), "optimizer groups hold other parameters"),
        (lambda: Model(dataclasses.replace(CONFIG, d_ff=40)), "mlp.w_gate.weight is .38, 25. in the checkpoint, .40"),
        (lambda: Model(dataclasses.replace(CONFIG, n_layers=3)), "no param/model.blocks.2"),
        (lambda: Model(dataclasses.replace(CONFIG, n_layers=1)), "has param/model.blocks.1.* does not know"),
    ],
)
def test_another_model_or_optimizer_is_refused_in_one_line(saved, module, message) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        fit(build_trainer(SINGLE, 4), module(), saved)
    assert "\n" not in str(error.value)


def test_other_optimizers_keep_their_state_too(tmp_path) -> None:
    path = tmp_path / "step-00000002"
    whole = fit(build_trainer(SINGLE, 4, callbacks=[SaveAt(2, path)]), Momentum())
    resumed = fit(build_trainer(SINGLE, 4), Momentum(), path)
    assert resumed.losses == whole.losses[2:]


def test_weights_without_optimizer_cannot_be_trained_on(tmp_path) -> None:
    trainer = build_trainer(SINGLE, 1)
    fit(trainer, Model())
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    with pytest.raises(CheckpointError, match="holds weights only"):
        fit(build_trainer(SINGLE, 2), Model(), tmp_path / "weights")


def test_state_that_could_not_be_loaded_safely_fails_at_save(tmp_path) -> None:
    class Careless(SaveAt):
        def state_dict(self):
            return {"path": Path("somewhere")}

    with pytest.raises(CheckpointError, match="state 'callbacks' holds more than plain values"):
        fit(build_trainer(SINGLE, 1, callbacks=[Careless(1, tmp_path / "step-00000001")]), Model())
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_tensors_changes_no_file(tmp_path) -> None:
    """A resumed optimizer may hold its states in another order; they are spread over the ranks as before."""
    tensors = {f"optim/{name}/{key}": torch.rand(3) for name in "ab" for key in ("exp_avg", "exp_avg_sq")}
    files = []
    for order in (list(tensors), list(tensors)[::-1]):
        checkpoint_io.save({key: tensors[key] for key in order}, {}, tmp_path / "step-00000001", 1)
        files.append(checkpoint.read_manifest(tmp_path / "step-00000001")["files"]["__0_0.distcp"])
    assert files[0] == files[1]
