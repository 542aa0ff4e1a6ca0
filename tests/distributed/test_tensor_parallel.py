"""Matrices cut over a group of devices compute what the whole ones do, with every stabiliser, forward and backward."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lm.config import ModelConfig, RuntimeConfig
from lm.datamodule import TokenDataModule
from lm.errors import ConfigError
from lm.init import materialize
from lm.loss import IGNORE
from lm.model import Llama
from lm.module import LlamaModule
from plugins.callbacks.throughput import Throughput
from plugins.strategies.fsdp import FSDP
from plugins.strategies.parallelize import parallelize
from plugins.strategies.tensor_parallel import check_divides, tensor_parallelize
from recipes import bench_ranks
from tests.distributed import harness
from tests.distributed.scenario import CONFIG, SINGLE, TENSOR_LAYOUTS, Layout, Model, build_trainer, fit

VARIANTS = {
    "plain": (CONFIG, RuntimeConfig()),
    "stabilised": (
        dataclasses.replace(CONFIG, qk_norm=True, attention_softcap=5.0, final_softcap=3.0),
        RuntimeConfig(activation_checkpointing="full"),
    ),
    "tied, selective": (
        dataclasses.replace(CONFIG, tie_embeddings=True, qk_norm=True),
        RuntimeConfig(activation_checkpointing="selective"),
    ),
}


def built(variant: str, mesh: Any = None) -> Llama:
    """A Llama with equal values on all ranks; norm gains are not 1, so that a wrong one shows."""
    config, runtime = VARIANTS[variant]
    with torch.device("meta"):
        model = Llama(dataclasses.replace(config, init_std=0.3), runtime)
    if mesh is not None:
        parallelize(model, mesh)
    materialize(model, model.config, 3, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(1.0 + 0.1 * len(name) / 30)
    return model


def objective(model: Llama) -> dict[str, torch.Tensor]:
    """Logits, losses with a z-loss, and every gradient whole; half of the positions are a second document."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, CONFIG.vocab_size, (2, 12), generator=generator) for _ in range(2))
    labels[0, 3:5] = IGNORE
    documents = torch.arange(12).expand(2, 12) // 7
    with torch.no_grad():
        logits = model(ids, documents)
    nll, logsumexp = model(ids, documents, labels, with_logsumexp=True)
    (nll.sum() / 20 + 0.01 * logsumexp.square().mean()).backward()
    found = {"logits": logits, "nll": nll.detach(), "logsumexp": logsumexp.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def compare_with_whole() -> dict[str, dict[str, float]]:
    """Largest difference of each result, relative to the largest value in it."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    differences = {}
    for variant in VARIANTS:
        cut, whole = objective(built(variant, mesh)), objective(built(variant))
        assert cut.keys() == whole.keys()
        differences[variant] = {
            name: float((cut[name] - whole[name]).abs().max() / whole[name].abs().max()) for name in whole
        }
    return differences


def test_logits_losses_and_gradients_equal_the_whole_model() -> None:
    for differences in harness.run(compare_with_whole, 2):
        assert set(differences) == set(VARIANTS)
        for variant, by_name in differences.items():
            assert len(by_name) > 15
            for name, difference in by_name.items():
                assert difference < 1e-5, (variant, name, difference)


class Recorded(LlamaModule):
    """Keeps what it reports, but for speeds."""

    rows: list[dict[str, float]]

    def record(self, values):
        super().record(values)
        self.rows.append({key: value for key, value in values.items() if key != "tokens_per_s"})


def recipe_run(folder: Path, layout: Layout) -> list[dict[str, float]]:
    """The recipe's own module, data and throughput, with accumulation and a validation at the end."""
    options = {"log_every_n_steps": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    trainer = build_trainer(layout, 4, accumulate=1, callbacks=[Throughput()], **options)
    data = TokenDataModule(str(folder / "data"), 32, 128, micro_batch_size=1, validation_windows=3)
    module = Recorded(dataclasses.replace(CONFIG, vocab_size=300, qk_norm=True), z_loss=1e-3)
    module.rows = []
    trainer.fit(module, datamodule=data)
    return module.rows


def test_the_recipe_reports_the_same_under_tensor_parallelism(tmp_path) -> None:
    bench_ranks.write_data(Namespace(processes=4, vocab_size=300), tmp_path)
    (reference,) = harness.run(recipe_run, 1, tmp_path, SINGLE)
    reported = {key for row in reference for key in row}
    assert {"loss", "grad_norm", "tokens", "val_loss", "bpb/random"} <= reported
    for rows in harness.run(recipe_run, 4, tmp_path, TENSOR_LAYOUTS[1]):
        assert [row.keys() for row in rows] == [row.keys() for row in reference]
        for row, wanted in zip(rows, reference, strict=True):
            assert row == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["n_heads", "n_kv_heads", "d_ff"])
def test_a_model_that_does_not_divide_is_refused_in_one_line(name: str) -> None:
    sizes = {"n_heads": 6, "n_kv_heads": 6, "d_ff": 12}
    good = ModelConfig(vocab_size=97, d_model=24, n_layers=1, d_head=4, **sizes)
    check_divides(good, 3)
    changes = {"n_heads": {"n_heads": 4, "n_kv_heads": 2}, "n_kv_heads": {"n_kv_heads": 2}, "d_ff": {"d_ff": 13}}
    bad = dataclasses.replace(good, **changes[name])
    with pytest.raises(ConfigError, match=f"model.config.{name} .* does not divide by tensor_parallel 3") as error:
        check_divides(bad, 3)
    assert "\n" not in str(error.value)


def test_compiled_blocks_are_refused() -> None:
    """Their gradients were wrong: of a run of 3 steps over 2 processes the norm by 8%."""
    with torch.device("meta"):
        model = Llama(CONFIG, RuntimeConfig(compile=True))
    with pytest.raises(ConfigError, match=r"model\.runtime\.compile true gives wrong gradients with tensor_parallel"):
        tensor_parallelize(model, CONFIG, Namespace(size=lambda: 2))


def test_tensor_parallel_must_divide_the_devices_of_a_node() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel must be at least 1, got 0"):
        FSDP(tensor_parallel=0)
    trainer = build_trainer(Layout("fsdp", 1, {"tensor_parallel": 2}), 1)
    with pytest.raises(ConfigError, match="tensor_parallel 2 does not divide the 1 devices of a node"):
        fit(trainer, Model())
