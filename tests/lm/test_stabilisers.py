"""What each stabiliser and each way of computing does, on the model and the module."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from lm.config import ModelConfig, RuntimeConfig
from lm.errors import ConfigError
from lm.init import init_std, materialize
from lm.model import Llama
from lm.module import LlamaModule
from lm.plan import count_parameters

SMALL = ModelConfig(vocab_size=97, d_model=48, n_layers=3, n_heads=6, n_kv_heads=2, init_std=0.2)
DOCUMENTS = torch.tensor([[0] * 11 + [1] * 17 + [2] * 12] * 2)


def make(config: ModelConfig = SMALL, runtime: RuntimeConfig = RuntimeConfig()) -> Llama:
    with torch.device("meta"):
        model = Llama(config, runtime)
    materialize(model, config, 0, torch.device("cpu"))
    return model


def ids(columns: int = 40) -> torch.Tensor:
    return torch.randint(0, 97, (2, columns), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: Llama) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(ids(), DOCUMENTS, ids().roll(-1, 1)).mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def test_qk_norm_makes_scores_independent_of_the_size_of_queries_and_keys():
    model = make(dataclasses.replace(SMALL, qk_norm=True))
    plain = make()
    before, plain_before = model(ids()), plain(ids())
    with torch.no_grad():
        for net in (model, plain):
            for block in net.blocks:
                block.attention.wq.weight.mul_(30.0)
                block.attention.wk.weight.mul_(30.0)
    torch.testing.assert_close(model(ids()), before, atol=2e-3, rtol=2e-3)
    assert (plain(ids()) - plain_before).abs().max() > 0.1


def test_qk_norm_parameters_are_counted_and_grouped_as_norms():
    config = dataclasses.replace(SMALL, qk_norm=True)
    model = make(config)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total
    assert (model.blocks[0].attention.q_norm.weight == 1).all()


def test_softcaps_bound_logits_and_scores():
    hot = dataclasses.replace(SMALL, init_std=2.0)
    assert make(hot)(ids()).abs().max() > 5.0
    capped = make(dataclasses.replace(hot, final_softcap=5.0))
    logits = capped(ids())
    assert logits.abs().max() <= 5.0
    torch.testing.assert_close(logits, 5.0 * torch.tanh(make(hot)(ids()) / 5.0))
    labels = ids().roll(-1, 1)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(capped(ids(), None, labels).flatten(), nll, atol=1e-5, rtol=1e-5)
    # With scores capped at c, no key's weight is beyond exp(2 c) times another's: a tiny cap means a plain average.
    flat = make(dataclasses.replace(hot, attention_softcap=1e-4)).blocks[0].attention
    uniform = make(hot).blocks[0].attention
    with torch.no_grad():
        uniform.wq.weight.zero_()
    from lm.attention import pack
    from lm.rope import rope_table

    x = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(2))
    inputs = (*rope_table(40, 8, 10_000.0, torch.device("cpu")), pack(None, (2, 40), torch.device("cpu")))
    torch.testing.assert_close(flat(x, *inputs), uniform(x, *inputs), atol=5e-3, rtol=5e-3)


def test_depth_scaled_init_keeps_the_residual_stream_from_growing_with_depth():
    deep = dataclasses.replace(SMALL, n_layers=32)
    name = "blocks.0.attention.wo.weight"
    assert init_std(name, deep) == pytest.approx(0.2 / 8)
    assert init_std(name, dataclasses.replace(deep, depth_scaled_init=False)) == 0.2

    def final_rms(config: ModelConfig) -> float:
        model = make(config)
        seen = []
        model.norm.register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0].square().mean().sqrt().item())
        )
        model(ids())
        return seen[0]

    assert final_rms(deep) < 0.5 * final_rms(dataclasses.replace(deep, depth_scaled_init=False))


def module_step(z_loss: float) -> tuple[float, float, torch.Tensor]:
    """Objective, reported loss and the head's gradient of one training step."""
    module = LlamaModule(SMALL, z_loss=z_loss)
    module.model = make()
    module._trainer = SimpleNamespace(accumulate_grad_batches=1)
    labels = ids().roll(-1, 1)
    labels[0, 7] = -100
    batch = {"input_ids": ids(), "document_ids": DOCUMENTS, "labels": labels, "loss_tokens": 79.0}
    objective = module.training_step(batch, 0)
    objective.backward()
    return objective.item(), float(module.step_loss), module.model.head.weight.grad


def test_z_loss_is_in_the_objective_and_not_in_the_reported_loss():
    plain, reported, gradient = module_step(0.0)
    objective, reported_z, gradient_z = module_step(0.5)
    assert plain == reported == reported_z
    logits = make()(ids(), DOCUMENTS)
    counted = torch.ones(2, 40, dtype=torch.bool)
    counted[0, 7] = False
    expected = 0.5 * logits.logsumexp(-1)[counted].square().sum() / 79.0
    assert objective - plain == pytest.approx(expected.item(), rel=1e-4)
    assert not torch.equal(gradient, gradient_z)


def saved_bytes(kind: str) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Bytes kept for backward, loss and gradients."""
    model = make(runtime=RuntimeConfig(activation_checkpointing=kind))
    storages: dict[int, int] = {}

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        loss = model(ids(), DOCUMENTS, ids().roll(-1, 1)).mean()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = sum(size for address, size in storages.items() if address not in weights)
    loss.backward()
    return kept, loss.detach(), [p.grad for p in model.parameters()]


def test_full_checkpointing_keeps_block_inputs_only_and_changes_no_bit():
    none, full = saved_bytes("none"), saved_bytes("full")
    assert full[0] < 0.5 * none[0]
    assert torch.equal(none[1], full[1])
    assert all(torch.equal(a, b) for a, b in zip(none[2], full[2], strict=True))


def test_selective_checkpointing_computes_products_once_and_the_rest_twice():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(kind: str) -> int:
        model = make(runtime=RuntimeConfig(activation_checkpointing=kind))
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(model)
        return counter.get_total_flops()

    none, selective, full = (flops(kind) for kind in ("none", "selective", "full"))
    assert none == selective < full
    expected = loss_and_gradients(make())
    got = loss_and_gradients(make(runtime=RuntimeConfig(activation_checkpointing="selective")))
    assert torch.equal(expected[0], got[0])
    assert all(torch.equal(a, b) for a, b in zip(expected[1], got[1], strict=True))


def test_runtime_names_are_checked():
    with pytest.raises(ConfigError, match="activation_checkpointing must be one of none, full, selective"):
        RuntimeConfig(activation_checkpointing="some")
