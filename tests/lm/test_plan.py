"""lm/plan.py against published counts, closed formulas and real torch modules."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lm.config import ModelConfig
from lm.model import Llama
from lm.plan import (
    FLOP_CONVENTIONS,
    count_parameters,
    flops_per_token,
    memory_bytes,
    n_params,
    parameter_shapes,
    steps_for_budget,
    tokens_for_budget,
    training_flops,
)

LLAMA_2_7B = ModelConfig(vocab_size=32_000, d_model=4096, n_layers=32, n_heads=32, d_ff=11_008)
PLAN_7B = ModelConfig(vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=11_008)


def test_llama_2_7b_count_is_the_published_one() -> None:
    assert count_parameters(LLAMA_2_7B).total == 6_738_415_616


def test_parts_of_the_7b_plan() -> None:
    count = count_parameters(PLAN_7B)
    assert count.total - count.norms == 6_721_372_160
    assert count.attention / 32 == pytest.approx(41.9e6, rel=2e-3)
    assert count.mlp / 32 == pytest.approx(135.3e6, rel=1e-3)
    assert count.embedding + count.head == pytest.approx(1.05e9, rel=2e-3)
    assert count.matmul == pytest.approx(6.196e9, rel=1e-4)


def test_tied_head_is_stored_once_but_still_multiplies() -> None:
    untied = ModelConfig(vocab_size=1000, d_model=64, n_layers=2, n_heads=2)
    tied = ModelConfig(vocab_size=1000, d_model=64, n_layers=2, n_heads=2, tie_embeddings=True)
    assert count_parameters(untied).total - count_parameters(tied).total == 64_000
    assert n_params(untied, "matmul") == n_params(tied, "matmul")
    assert flops_per_token(untied, 128) == flops_per_token(tied, 128)


def test_flops_per_token_of_the_7b_plan() -> None:
    assert flops_per_token(PLAN_7B, 4096, "matmul+causal_attention") == pytest.approx(40.40e9, rel=1e-3)
    assert flops_per_token(PLAN_7B, 4096, "6N") == pytest.approx(40.33e9, rel=1e-3)
    assert training_flops(PLAN_7B, 2e12, 4096) == pytest.approx(8.08e22, rel=1e-3)


def test_llama_2_7b_palm_flops() -> None:
    assert training_flops(LLAMA_2_7B, 2e12, 4096, "palm") == pytest.approx(9.4e22, rel=5e-3)


def test_conventions_on_a_small_model_by_hand() -> None:
    # L 2, d 8, h 2 of 6 (d_attn 12, wider than d), k 1, f 16, V 10, T 4
    config = ModelConfig(vocab_size=10, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, d_head=6, d_ff=16)
    blocks = 2 * (2 * 8 * 12 + 2 * 8 * 6 + 3 * 8 * 16)
    total = blocks + 2 * 80 + 5 * 8
    assert count_parameters(config).total == total
    assert flops_per_token(config, 4, "6N") == 6 * total
    assert flops_per_token(config, 4, "matmul+causal_attention") == 6 * (blocks + 80) + 6 * 2 * 4 * 12
    assert flops_per_token(config, 4, "palm") == 6 * total + 12 * 2 * 4 * 12
    assert flops_per_token(config, 4, "kaplan") == 6 * blocks


@pytest.mark.parametrize("convention", sorted(FLOP_CONVENTIONS))
def test_tokens_for_a_budget_invert_training_flops(convention: str) -> None:
    tokens = tokens_for_budget(LLAMA_2_7B, 1e20, 2048, convention)
    assert training_flops(LLAMA_2_7B, tokens, 2048, convention) == pytest.approx(1e20, rel=1e-12)


def test_steps_come_nearest_to_the_budget() -> None:
    config = ModelConfig(vocab_size=1024, d_model=64, n_layers=3, n_heads=2)
    steps = steps_for_budget(config, 1e12, 128, 1024)
    spent = [training_flops(config, s * 1024, 128) for s in (steps - 1, steps, steps + 1)]
    assert min(spent, key=lambda flops: abs(flops - 1e12)) == spent[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flops_per_token(LLAMA_2_7B, 128, "7N"), "unknown FLOP convention '7N'; choose one of 6N"),
        (lambda: n_params(LLAMA_2_7B, "most"), "unknown parameter convention 'most'"),
        (lambda: flops_per_token(LLAMA_2_7B, 0), "sequence_length must be at least 1"),
        (lambda: tokens_for_budget(LLAMA_2_7B, 0.0, 128), "budget_flops must be positive"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("tied", [False, True])
def test_count_equals_real_modules(tied: bool) -> None:
    config = ModelConfig(vocab_size=96, d_model=48, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=112, tie_embeddings=tied)
    with torch.device("meta"):
        llama = Llama(config)
    count = count_parameters(config)
    assert sum(p.numel() for p in llama.parameters()) == count.total
    by_part = {"attention": 0, "mlp": 0, "norm": 0, "embedding": 0, "head": 0}
    for name, parameter in llama.named_parameters():
        part = next(p for p in ("norm", "attention", "mlp", "embedding", "head") if p in name)
        by_part[part] += parameter.numel()
    assert by_part["attention"] == count.attention
    assert by_part["mlp"] == count.mlp
    assert by_part["norm"] == count.norms


def test_import_brings_no_framework() -> None:
    code = "import sys, lm.plan; print(sorted({'torch', 'lightning', 'ray', 'mlflow'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_shapes_are_those_of_the_real_model(tied: bool) -> None:
    config = ModelConfig(
        vocab_size=96, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, tie_embeddings=tied, qk_norm=tied
    )
    with torch.device("meta"):
        real = {name: tuple(parameter.shape) for name, parameter in Llama(config).named_parameters()}
    assert parameter_shapes(config) == real
    assert list(parameter_shapes(config)) == list(real)


def test_memory_of_7b_under_adamw() -> None:
    total = count_parameters(LLAMA_2_7B).total
    assert memory_bytes(LLAMA_2_7B, "ddp", 8).total == 16 * total  # 4 + 4 + 8 bytes a parameter
    assert memory_bytes(LLAMA_2_7B, "fsdp", 8).total == pytest.approx(16 * total / 8, rel=1e-6)
    assert memory_bytes(LLAMA_2_7B, "hsdp", 16, shard=8) == memory_bytes(LLAMA_2_7B, "fsdp", 8)
    zero2 = memory_bytes(LLAMA_2_7B, "zero2", 8)
    assert zero2.parameters == pytest.approx(4 * total * (1 + 1 / 8), rel=1e-6)
    assert total / 2 <= zero2.gradients < 1.2 * total / 2
