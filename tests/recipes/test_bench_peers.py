"""The peer trains what the recipe trains, and ratios say whose seconds are whose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.plan import count_parameters
from recipes.bench_peers import _ratios, build_parser, matmul_share, run

ROOT = Path(__file__).parents[2]


def test_both_sides_have_the_same_shape() -> None:
    import torch
    from transformers import LlamaForCausalLM

    from recipes.bench_peers_hf import llama_config

    options = build_parser().parse_args([])
    with torch.device("meta"):
        peer = LlamaForCausalLM(llama_config(options))
    ours = ModelConfig(options.vocab_size, options.d_model, options.n_layers, options.d_model // 64)
    assert (options.d_model, options.n_layers, options.sequence_length, options.vocab_size) == (512, 6, 512, 4096)
    assert sum(parameter.numel() for parameter in peer.parameters()) == count_parameters(ours).total


def test_a_ratio_above_one_means_that_the_recipe_is_faster() -> None:
    assert _ratios([1.0, 2.0, 1.0], [2.0, 2.0, 1.5]) == {"": 1.5, "_each": [2.0, 1.0, 1.5]}


def test_the_first_side_is_ours() -> None:
    with pytest.raises(ConfigError, match="held against, got hf-fp32"):
        run(["--sides", "hf-fp32", "recipe"])


def test_the_share_of_matrix_products_is_that_of_the_profile() -> None:
    import torch

    torch.manual_seed(0)
    large, small = torch.randn(700, 700), torch.randn(4, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as products:
        large @ large
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as others:
        small @ small
        large.exp()
    assert matmul_share(products.key_averages()) > 0.8 > 0.5 > matmul_share(others.key_averages()) > 0


@pytest.mark.slow
def test_all_sides_take_turns() -> None:
    shape = ["--d-model", "64", "--n-layers", "1", "--sequence-length", "32", "--vocab-size", "300"]
    line = [sys.executable, "-m", "recipes.bench", "peers", *shape, "--sequences", "2", "--rounds", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["tokens_per_s"]) == {"recipe", "hf-fp32", "hf-bf16"}
    assert len(result["recipe_over_hf-bf16_each"]) == 3 and result["recipe_over_hf-fp32"] > 0
    assert set(result["matmul_share"]) == set(result["tokens_per_s"])
    assert all(0 < share < 1 for share in result["matmul_share"].values())
    assert "round 3 of 3: recipe" in done.stderr
    assert result["picked"].startswith("picked 32-true, no compilation: d_model 64")
