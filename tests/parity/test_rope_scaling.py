"""RoPE scaling against transformers' own tables, and against what each rule promises."""

from __future__ import annotations

import math

import pytest
import torch

from lm.config import ModelConfig, model_config_from
from lm.rope import rope_frequencies, rope_table
from lm.rope_scaling import RopeScaling

CPU = torch.device("cpu")
D_HEAD, ORIGINAL = 64, 128

CASES = {
    "none": (None, {"rope_type": "default"}),
    "linear": (RopeScaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (RopeScaling("dynamic", 2.0, ORIGINAL), {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (
        RopeScaling("yarn", 4.0, ORIGINAL),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ),
    "yarn, all given": (
        RopeScaling("yarn", 8.0, ORIGINAL, beta_fast=8.0, beta_slow=0.5, attention_factor=1.3),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "attention_factor": 1.3,
        },
    ),
    "llama3": (
        RopeScaling("llama3", 8.0, ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": ORIGINAL,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("length", [64, ORIGINAL, 512])
@pytest.mark.parametrize("case", CASES)
def test_tables_equal_transformers(case: str, length: int, theta: float) -> None:
    """transformers computes angles in fp32: at position 512 they carry an error of 512 x 2^-24 or so."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, parameters = CASES[case]
    config = LlamaConfig(
        hidden_size=D_HEAD,
        num_attention_heads=1,
        max_position_embeddings=ORIGINAL,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(length)[None])
    ours = rope_table(length, D_HEAD, theta, CPU, scaling)
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(mine, theirs[0, :, : D_HEAD // 2], atol=1e-4, rtol=0)


def test_the_kinds_differ_where_they_should() -> None:
    """Otherwise equality with transformers could be that of tables in which scaling does nothing."""
    tables = [rope_table(512, D_HEAD, 10_000.0, CPU, scaling)[0] for scaling, _ in CASES.values()]
    for index, table in enumerate(tables):
        for other in tables[:index]:
            assert (table - other).abs().max() > 0.1


def test_dynamic_is_plain_up_to_the_original_length() -> None:
    scaling = RopeScaling("dynamic", 2.0, ORIGINAL)
    plain = rope_frequencies(ORIGINAL, D_HEAD, 10_000.0)
    assert torch.equal(rope_frequencies(ORIGINAL, D_HEAD, 10_000.0, scaling), plain)
    longer = rope_frequencies(ORIGINAL + 1, D_HEAD, 10_000.0, scaling)
    assert longer[0] == plain[0] and (longer[1:] < plain[1:]).all()


def test_dynamic_interpolates_the_lowest_frequency_exactly() -> None:
    """NTK-aware: at s times the length (and factor s) the slowest pair turns s times slower, but for the -(s - 1)."""
    stretch = 2.0 * 512 / ORIGINAL - 1.0
    plain, longer = (rope_frequencies(512, D_HEAD, 10_000.0, s) for s in (None, RopeScaling("dynamic", 2.0, ORIGINAL)))
    assert float(plain[-1] / longer[-1]) == pytest.approx(stretch, rel=1e-12)


def test_llama3_bands() -> None:
    """Long wavelengths are divided by the factor, short ones are kept, exactly."""
    plain = rope_frequencies(1, D_HEAD, 10_000.0)
    scaled = rope_frequencies(1, D_HEAD, 10_000.0, CASES["llama3"][0])
    wavelengths = 2 * math.pi / plain
    assert torch.equal(scaled[wavelengths < ORIGINAL / 4], plain[wavelengths < ORIGINAL / 4])
    assert torch.equal(scaled[wavelengths > ORIGINAL], plain[wavelengths > ORIGINAL] / 8)
    between = (wavelengths > ORIGINAL / 4) & (wavelengths < ORIGINAL)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_yarn_scales_cosines_and_sines() -> None:
    scaling = RopeScaling("yarn", 4.0, ORIGINAL)
    cos, sin = rope_table(32, D_HEAD, 10_000.0, CPU, scaling)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, (0.1 * math.log(4.0) + 1) ** 2))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"kind": "longrope", "factor": 2.0}, "linear, dynamic, yarn, llama3"),
        ({"kind": "linear", "factor": 0.5}, "factor"),
        ({"kind": "dynamic", "factor": 2.0}, "original_max_position"),
        ({"kind": "llama3", "factor": 8.0, "original_max_position": 8192, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"kind": "yarn", "factor": 8.0, "original_max_position": 8192, "beta_slow": 40.0}, "beta_slow"),
        ({"kind": "yarn", "factor": 8.0, "original_max_position": 8192, "attention_factor": 0.0}, "attention_factor"),
    ],
)
def test_nonsense_is_refused_in_one_line(values: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word) as error:
        RopeScaling(**values)
    assert "\n" not in str(error.value)


def test_a_config_survives_a_checkpoint() -> None:
    import dataclasses

    config = ModelConfig(64, 32, 1, 2, rope_scaling=CASES["yarn, all given"][0])
    assert model_config_from(dataclasses.asdict(config)) == config
    with pytest.raises(ValueError, match="n_experts"):
        model_config_from({**dataclasses.asdict(config), "n_experts": 8})


def test_scaling_may_change_on_resume_and_the_shape_may_not() -> None:
    import dataclasses

    from lm.module import LlamaModule

    config = ModelConfig(64, 32, 1, 2)
    longer = dataclasses.replace(config, rope_theta=500_000.0, rope_scaling=CASES["llama3"][0])
    saved = {"model_config": dataclasses.asdict(config)}
    LlamaModule(longer).on_load_checkpoint(saved)
    with pytest.raises(ValueError, match="n_layers = 1, this run has 2"):
        LlamaModule(dataclasses.replace(longer, n_layers=2)).on_load_checkpoint(saved)
