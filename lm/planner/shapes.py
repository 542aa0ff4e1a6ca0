"""Shapes of published models, from the config.json of each, and a shape for a wished number of parameters."""

from __future__ import annotations

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.plan import count_parameters

_LLAMA_3 = {"vocab_size": 128_256, "n_kv_heads": 8, "rope_theta": 500_000.0}

SHAPES: dict[str, ModelConfig] = {
    "llama_2_7b": ModelConfig(32_000, 4096, 32, 32, d_ff=11_008),
    "llama_2_13b": ModelConfig(32_000, 5120, 40, 40, d_ff=13_824),
    "llama_2_70b": ModelConfig(32_000, 8192, 80, 64, n_kv_heads=8, d_ff=28_672),
    "llama_3_8b": ModelConfig(d_model=4096, n_layers=32, n_heads=32, d_ff=14_336, **_LLAMA_3),  # type: ignore[arg-type]
    "llama_3_70b": ModelConfig(d_model=8192, n_layers=80, n_heads=64, d_ff=28_672, **_LLAMA_3),  # type: ignore[arg-type]
    "llama_3.2_1b": ModelConfig(
        d_model=2048, n_layers=16, n_heads=32, d_ff=8192, tie_embeddings=True, **_LLAMA_3  # type: ignore[arg-type]
    ),
    "tinyllama_1.1b": ModelConfig(32_000, 2048, 22, 32, n_kv_heads=4, d_ff=5632),
    "smollm2_135m": ModelConfig(49_152, 576, 30, 9, n_kv_heads=3, d_ff=1536, rope_theta=1e5, tie_embeddings=True),
    "smollm2_360m": ModelConfig(49_152, 960, 32, 15, n_kv_heads=5, d_ff=2560, rope_theta=1e5, tie_embeddings=True),
    "smollm2_1.7b": ModelConfig(49_152, 2048, 24, 32, d_ff=8192, rope_theta=1.3e5, tie_embeddings=True),
}  # fmt: skip


def shape_for(n_params: float, vocab_size: int, tie_embeddings: bool = False) -> ModelConfig:
    """A Llama with about `n_params` parameters in all: d_head 128 (64 below d 1,024), 128 of width a layer, GQA by 4
    where heads divide, the default MLP in multiples of 256.

    Raises:
        ConfigError: fewer parameters than the smallest such shape with this vocabulary.
    """
    candidates = []
    for width in range(2, 257):
        d_model = 64 * width if width < 16 else 128 * (width - 8)
        d_head = 64 if d_model < 1024 else 128
        n_heads = d_model // d_head
        n_kv_heads = n_heads // 4 if n_heads % 4 == 0 else n_heads
        for n_layers in range(max(2, d_model // 160), d_model // 96 + 2):
            candidates.append(
                ModelConfig(
                    vocab_size, d_model, n_layers, n_heads, n_kv_heads, d_ff_multiple=256, tie_embeddings=tie_embeddings
                )
            )
        if count_parameters(candidates[-1]).total > 2 * n_params:
            break
    best = min(candidates, key=lambda config: abs(count_parameters(config).total - n_params))
    found = count_parameters(best).total
    if abs(found / n_params - 1) > 0.2:
        raise ConfigError(
            f"no shape has about {n_params:.3g} parameters with a vocabulary of {vocab_size:,}: the nearest has "
            f"{found:.3g}; give model its sizes"
        )
    return best
