"""Logits and gradients of converted weights against transformers' LlamaForCausalLM, both directions, fp32."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from lm.config import ModelConfig, MuPConfig
from lm.hf import export_factor, hf_name
from lm.hf_weights import HFWeights, load_hf
from lm.init import materialize
from lm.model import Llama
from lm.rope_scaling import RopeScaling
from tests.parity.helpers import ORIGINAL, load_transformers, make, random_ids, save_hf

BASE = ModelConfig(vocab_size=97, d_model=48, n_layers=2, n_heads=6, init_std=0.1)
# With few pairs a head, the bands of YaRN and Llama 3 round to the same for other settings.
LARGE_HEADS = dataclasses.replace(BASE, n_heads=3, n_kv_heads=1, d_head=32)

SCALINGS = {
    "linear": RopeScaling("linear", 4.0),
    "dynamic": RopeScaling("dynamic", 2.0, ORIGINAL),
    "yarn": RopeScaling("yarn", 4.0, ORIGINAL),
    "llama3": RopeScaling("llama3", 8.0, ORIGINAL),
}

CONFIGS = {
    "mha": BASE,
    "gqa": dataclasses.replace(BASE, n_kv_heads=2, rope_theta=500_000.0),
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "gqa, tied, d_head given": dataclasses.replace(BASE, n_kv_heads=3, tie_embeddings=True, d_head=16, norm_eps=1e-6),
    **{kind: dataclasses.replace(LARGE_HEADS, rope_scaling=scaling) for kind, scaling in SCALINGS.items()},
    "yarn, all given": dataclasses.replace(
        LARGE_HEADS,
        rope_scaling=RopeScaling("yarn", 8.0, ORIGINAL, beta_fast=4.0, beta_slow=0.5, attention_factor=1.3),
    ),
    "mup": dataclasses.replace(BASE, n_kv_heads=2, mup=MuPConfig(base_width=16, base_d_head=32)),
    "mup, tied": dataclasses.replace(BASE, tie_embeddings=True, mup=MuPConfig(base_width=16, base_d_head=32)),
}


def assert_same(model: Llama, reference, length: int) -> None:
    """Logits within 1e-4, the gradient of every parameter within 1e-4 of its norm."""
    ids = random_ids(model.config.vocab_size, length)
    ours, theirs = model(ids), reference(ids).logits
    assert theirs.abs().mean() > 0.05  # zero logits would agree with anything
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours * weights).mean().backward()
    (theirs * weights).mean().backward()
    other = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        # Their parameter is factor x ours, so our gradient is factor x theirs.
        expected = other.pop(hf_name(name)) * export_factor(name, model.config)
        assert expected.norm() > 0, name
        assert (parameter.grad - expected).norm() / expected.norm() < 1e-4, name
    assert not other


@pytest.mark.parametrize("case", CONFIGS)
def test_ours_to_transformers(case: str, tmp_path) -> None:
    """512 positions, four times the original length of the scalings: a wrong layout is invisible at length 1."""
    model = make(CONFIGS[case])
    save_hf(model, tmp_path)
    assert_same(model, load_transformers(tmp_path), 512)


@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("kind", SCALINGS)
def test_scaling_of_short_windows(kind: str, length: int, tmp_path) -> None:
    """Below the original length too: dynamic is plain there, the others are not."""
    model = make(CONFIGS[kind])
    save_hf(model, tmp_path)
    assert_same(model, load_transformers(tmp_path), length)


def theirs_with(rope: dict, **changes):
    """transformers' own model with its own random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.1}
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, **heads, "max_position_embeddings": 512, "rope_parameters": rope, **changes})
    )


@pytest.mark.parametrize(
    ("rope", "changes"),
    [
        ({"rope_type": "default", "rope_theta": 10_000.0}, {}),
        ({"rope_type": "default", "rope_theta": 10_000.0}, {"num_key_value_heads": 3, "tie_word_embeddings": True}),
        ({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}, {}),
        ({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}, {"max_position_embeddings": ORIGINAL}),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": ORIGINAL,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
            {},
        ),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": ORIGINAL,
            },
            {},
        ),
    ],
    ids=["gqa", "mha tied", "linear", "dynamic", "yarn", "llama3"],
)
def test_transformers_to_ours(rope: dict, changes: dict, tmp_path) -> None:
    reference = theirs_with(rope, **changes)
    reference.save_pretrained(tmp_path)
    assert_same(load_hf(tmp_path), reference, 512)


@pytest.mark.parametrize("kind", ["gqa", *SCALINGS])
def test_both_layouts_of_rope_in_config_json(kind: str, tmp_path) -> None:
    """Either half of what we write is enough, for transformers and for us: rope_parameters, or the older keys."""
    model = make(CONFIGS[kind])
    save_hf(model, tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    ids = random_ids(97, 300)
    expected = model(ids)
    for dropped in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        path.write_text(json.dumps({key: value for key, value in whole.items() if key not in dropped}))
        torch.testing.assert_close(load_transformers(tmp_path)(ids).logits, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(load_hf(tmp_path)(ids), expected, atol=1e-6, rtol=0)
    old = {key: value for key, value in whole.items() if key not in ("rope_parameters", "dtype")}
    if old["rope_scaling"] is not None:
        old["rope_scaling"]["type"] = old["rope_scaling"].pop("rope_type")
    path.write_text(json.dumps(old))
    torch.testing.assert_close(load_hf(tmp_path)(ids), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", [case for case in CONFIGS if "mup" not in case])
def test_round_trip_is_bit_exact(case: str, tmp_path) -> None:
    """Ours, to Hugging Face, to ours: the same config but for initial values, and the same bits."""
    model = make(CONFIGS[case])
    save_hf(model, tmp_path, max_shard_bytes=40_000)  # several files
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    back = load_hf(tmp_path)
    assert dataclasses.replace(back.config, init_std=0.1) == model.config
    ours, theirs = dict(model.named_parameters()), dict(back.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_mup_is_taken_out_again(tmp_path) -> None:
    """A run with muP that starts from its own export has its own weights back, within a rounding."""
    model = make(CONFIGS["mup"])
    save_hf(model, tmp_path)
    with torch.device("meta"):
        back = Llama(model.config)
    materialize(back, model.config, 0, "cpu", HFWeights(tmp_path, model.config))
    for (name, one), (_, other) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=3e-7, atol=0, msg=name)
    ids = random_ids(97, 64)
    torch.testing.assert_close(back(ids), model(ids), atol=1e-5, rtol=0)


def test_bf16_export_is_rounded_once(tmp_path) -> None:
    model = make(BASE)
    save_hf(model, tmp_path, torch.bfloat16)
    back = load_hf(tmp_path)
    for (name, one), (_, other) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16).float(), other), name
