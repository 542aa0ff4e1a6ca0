"""How RoPE is stretched to windows longer than those a model was trained on. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lm.errors import ConfigError

KINDS = ("linear", "dynamic", "yarn", "llama3")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class RopeScaling:
    """Context extension; the numbers are those of transformers' modeling_rope_utils.

    linear: positions are divided by factor (Chen et al. 2023, arXiv 2306.15595, sec. 2.3).
    dynamic: the base grows with the window, from original_max_position on ("NTK-aware, dynamic"; Peng et al. 2023,
        arXiv 2309.00071, sec. 3.3). Shorter windows are plain. The window counts, not the document in it.
    yarn: low frequencies are divided by factor, high ones stay, a ramp lies between, and cosines and sines are scaled
        (arXiv 2309.00071, sec. 3.2 and 3.4).
    llama3: the same idea by wavelengths (Grattafiori et al. 2024, arXiv 2407.21783; Llama 3.1's released code).

    Attributes:
        kind: one of KINDS.
        factor: by how much the context grows, at least 1.
        original_max_position: positions before the extension; linear does not need it.
        low_freq_factor, high_freq_factor: llama3: wavelengths above original_max_position / low_freq_factor are
            divided by factor, those below original_max_position / high_freq_factor stay.
        beta_fast, beta_slow: yarn: pairs with more than beta_fast turns in original_max_position stay, those with
            fewer than beta_slow are divided by factor.
        attention_factor: yarn: what multiplies cosines and sines; null is 0.1 ln(factor) + 1.
    """

    kind: str
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        where = "model.rope_scaling"
        _require(self.kind in KINDS, f"{where}.kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        _require(1 <= self.factor < math.inf, f"{where}.factor must be at least 1, got {self.factor}")
        _require(
            self.original_max_position > 0 or (self.kind == "linear" and self.original_max_position == 0),
            f"{where}.original_max_position must be positive for {self.kind}, got {self.original_max_position}; "
            "set it to the sequence length before the extension",
        )
        _require(
            0 < self.low_freq_factor < self.high_freq_factor < math.inf,
            f"{where}.low_freq_factor must be positive and below high_freq_factor {self.high_freq_factor}, "
            f"got {self.low_freq_factor}",
        )
        _require(
            0 < self.beta_slow < self.beta_fast < math.inf,
            f"{where}.beta_slow must be positive and below beta_fast {self.beta_fast}, got {self.beta_slow}",
        )
        _require(
            self.attention_factor is None or 0 < self.attention_factor < math.inf,
            f"{where}.attention_factor must be positive, or null for 0.1 ln(factor) + 1, got {self.attention_factor}",
        )

    @property
    def attention_scaling(self) -> float:
        """What multiplies cosines and sines, so that scores grow by its square (arXiv 2309.00071, sec. 3.4)."""
        if self.kind != "yarn":
            return 1.0
        return yarn_attention(self.factor) if self.attention_factor is None else self.attention_factor


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 (arXiv 2309.00071, sec. 3.4; mscale is DeepSeek's addition)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
