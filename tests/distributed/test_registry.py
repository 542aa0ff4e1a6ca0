"""Names for the command line, and the one-line errors of a wrong layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

from plugins.strategies import NAMES, register
from plugins.strategies.ddp import DDP
from plugins.strategies.deepspeed import ZeRO
from plugins.strategies.fsdp import FSDP
from plugins.strategies.hsdp import HSDP, mesh_sizes
from plugins.strategies.single import Single
from tests.distributed.scenario import SINGLE, Model, build_trainer, fit, quiet

ROOT = Path(__file__).parents[2]
CLASSES = {"single": Single, "ddp": DDP, "fsdp": FSDP, "hsdp": HSDP, "zero1": ZeRO, "zero2": ZeRO, "zero3": ZeRO}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_its_strategy_on_a_cpu(name: str) -> None:
    quiet()
    register()
    register()
    assert name in StrategyRegistry.available_strategies()
    devices = 1 if name == "single" else 2
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=name, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is CLASSES[name]
    assert trainer.strategy.root_device.type == "cpu"
    if name.startswith("zero"):
        assert trainer.strategy.config["zero_optimization"]["stage"] == int(name[-1])


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, plugins.strategies, plugins.strategies.checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_mesh_sizes() -> None:
    assert mesh_sizes(None, None, n_nodes=4, n_devices=8) == (4, 8)
    assert mesh_sizes(2, None, n_nodes=1, n_devices=8) == (2, 4)
    assert mesh_sizes(None, 2, n_nodes=1, n_devices=8) == (4, 2)
    assert mesh_sizes(2, 4, n_nodes=1, n_devices=8) == (2, 4)
    for wrong in [(3, None), (None, 3), (0, None), (2, 2), (8, 8)]:
        with pytest.raises(ValueError, match="hsdp") as error:
            mesh_sizes(*wrong, n_nodes=1, n_devices=8)
        assert "\n" not in str(error.value)


def test_single_refuses_several_devices() -> None:
    trainer = build_trainer(SINGLE, 1)
    trainer.strategy.parallel_devices = [torch.device("cpu")] * 2
    with pytest.raises(ValueError, match="strategy single runs on one device"):
        fit(trainer, Model())


def test_zero_without_deepspeed_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("plugins.strategies.deepspeed.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'scalewright\[deepspeed\]'"):
        ZeRO(stage=2)


def test_unsupported_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision bf16-true is not supported by Single"):
        fit(build_trainer(SINGLE, 1, precision="bf16-true"), Model())


@pytest.mark.parametrize("arguments", [{"stage": 4}, {"stage": 2, "offload_parameters": True}])
def test_wrong_zero_arguments(arguments) -> None:
    with pytest.raises(ValueError, match="stage"):
        ZeRO(**arguments)
