"""State kept in CPU memory, and settings handed through to DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.module import LlamaModule
from plugins.strategies import agreement
from plugins.strategies.deepspeed import ZeRO
from plugins.strategies.fsdp import FSDP
from plugins.strategies.hsdp import HSDP
from plugins.strategies.parts import Part, gradient_parts
from plugins.strategies.single import Single
from tests.distributed import harness, jobs
from tests.distributed.scenario import SINGLE, Layout, Model, build_trainer, fit
from tests.distributed.test_parity import assert_close

OFFLOADED = [
    Layout("zero", 2, {"stage": 2, "offload_optimizer": True}, "zero2-offload"),
    Layout("zero", 2, {"stage": 3, "offload_optimizer": True, "offload_parameters": True}, "zero3-offload"),
]


def whole_and_resumed(layout, folder):
    path = folder / layout.name
    return {"whole": jobs.whole_run(layout, path), "resumed": jobs.resume(layout, path)}


@pytest.mark.parametrize("layout", OFFLOADED, ids=lambda layout: layout.name)
def test_offload_changes_no_loss(runs, layout: Layout, tmp_path) -> None:
    result = harness.run(whole_and_resumed, layout.world_size, layout, tmp_path)[0]
    reference = runs.result(SINGLE)["whole"]
    assert_close(result["whole"]["losses"], reference["losses"])
    assert_close(result["whole"]["norms"], reference["norms"])
    assert_close(result["resumed"]["losses"], reference["losses"][jobs.SAVED_STEP :])


def test_offload_options_reach_deepspeed() -> None:
    zero = {"offload_optimizer": {"pin_memory": True}, "sub_group_size": 1000}
    settings = ZeRO(2, offload_optimizer=True, config={"zero_optimization": zero, "wall_clock_breakdown": True}).config
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert settings["zero_optimization"]["offload_optimizer"]["pin_memory"] is True
    assert settings["zero_optimization"]["sub_group_size"] == 1000
    assert settings["zero_optimization"]["stage"] == 2
    assert settings["wall_clock_breakdown"] is True
    parameters = ZeRO(3, offload_parameters=True).config["zero_optimization"]["offload_param"]
    assert parameters["device"] == "cpu"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 3}}, "config.zero_optimization.stage is set by the argument stage"),
        ({"gradient_clipping": 1.0}, "config.gradient_clipping is set by trainer.gradient_clip_val"),
        ({"bf16": {"enabled": True}}, "config.bf16 is set by trainer.precision"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "set offload_optimizer: true"),
        ({"zero_optimization": 2}, "must be a section of settings, got 2"),
        ({"zero_optimization": {"sub_group_size": {}}}, "must be a single value"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "takes parameters for one another in checkpoints"),
    ],
)
def test_conflicting_settings_are_refused_in_one_line(config, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ZeRO(2, config=config)
    assert "\n" not in str(error.value)


def test_offload_is_to_memory() -> None:
    """Checkpoints would lack what DeepSpeed keeps elsewhere."""
    for stage, name, switch in (
        (2, "offload_optimizer", "offload_optimizer"),
        (3, "offload_param", "offload_parameters"),
    ):
        with pytest.raises(ValueError, match=f"config.zero_optimization.{name}.device is refused"):
            ZeRO(stage, **{switch: True}, config={"zero_optimization": {name: {"device": "nvme"}}})


def said_of(config) -> str:
    with pytest.raises(ConfigError) as error:
        fit(build_trainer(Layout("zero", 1, {"stage": 2, "config": config}), 1), Model())
    return str(error.value)


def test_what_deepspeed_refuses_is_one_line() -> None:
    """A misspelt key, and settings that do not go together, which it asserts."""
    for config, message in (
        ({"zero_optimization": {"sub_grup_size": 5}}, "sub_grup_size Extra inputs"),
        ({"prescale_gradients": True}, "pre-scale gradients is not yet supported"),
    ):
        (said,) = harness.run(said_of, 1, config)
        assert said.startswith("DeepSpeed refuses the settings of zero: ") and message in said and "\n" not in said


@pytest.mark.parametrize("strategy", [FSDP, HSDP])
def test_cpu_offload_is_refused_without_cuda(strategy) -> None:
    trainer = build_trainer(Layout(strategy.strategy_name, 1, {"cpu_offload": True}), 1)
    with pytest.raises(ValueError, match="cpu_offload needs CUDA, this run is on cpu") as error:
        fit(trainer, Model())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("strategy", [FSDP, HSDP])
def test_cpu_offload_needs_a_backend_for_the_cpu(strategy) -> None:
    assert strategy(cpu_offload=True)._process_group_backend == "cpu:gloo,cuda:nccl"
    with pytest.raises(ConfigError, match=r"which nccl does not reach; leave process_group_backend out$"):
        strategy(cpu_offload=True, process_group_backend="nccl")


def test_an_offloaded_norm_is_exchanged_from_the_device(monkeypatch) -> None:
    """DeepSpeed hands it out on the CPU, from which NCCL sends nothing."""
    strategy, seen = Single(), []
    strategy.parallel_devices = [torch.device("meta")]
    strategy._lightning_module = SimpleNamespace(step_loss=0.5)
    strategy.guards = [lambda norm, loss: False]
    monkeypatch.setattr(agreement, "agree", lambda norm, loss: seen.append(norm.device.type) or (1.0, 0.5))
    assert not strategy._must_skip(torch.tensor(1.0), None)
    assert seen == ["meta"]


def test_validation_sums_lie_where_losses_do_and_not_where_parameters_are_kept() -> None:
    module = LlamaModule(ModelConfig(50, 32, 1, 2))
    module.model = SimpleNamespace()
    sets = SimpleNamespace(validation_sets=["a", "b"])
    module._trainer = SimpleNamespace(
        global_step=0, datamodule=sets, strategy=SimpleNamespace(root_device=torch.device("meta"))
    )
    module.on_validation_epoch_start()
    assert module.device.type == "cpu" and module._validation_sums.device.type == "meta"


def test_offloaded_gradients_are_read_after_they_have_arrived(monkeypatch) -> None:
    flat = torch.zeros(4)
    flat.grad = torch.zeros(4)
    zero = SimpleNamespace(averaged_gradients={}, bit16_groups=[[]], single_partition_of_fp32_groups=[flat])
    strategy = SimpleNamespace(_zero_optimizer=lambda: zero)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: flat.grad.fill_(2.0))
    ((part, gradient),) = gradient_parts(strategy, {flat: [Part("a", 0, 4)]})
    assert part.name == "a" and gradient.sum() == 8
