"""Model shapes as frozen dataclasses. Standard library only, so that the arithmetic about models can use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lm.errors import ConfigError
from lm.rope_scaling import RopeScaling


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class MuPConfig:
    """Maximal-update parametrisation (Yang et al. 2022, arXiv 2203.03466, table 8).

    The width multiplier is m = d_model / base_width. Hidden matrices get LR / m and init std / sqrt(m), logits
    are divided by m, attention scores are divided by d_head (equal to the usual sqrt(d_head) at base_d_head).

    Attributes:
        base_width: d_model at which the learning rate was tuned; at this width nothing changes.
        base_d_head: head size at which attention scores keep their usual 1 / sqrt(d_head).
    """

    base_width: int = 64
    base_d_head: int = 32

    def __post_init__(self) -> None:
        _require(self.base_width > 0, f"mup.base_width must be positive, got {self.base_width}")
        _require(self.base_d_head > 0, f"mup.base_d_head must be positive, got {self.base_d_head}")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama model (no biases anywhere).

    Attributes:
        vocab_size: V, ids the embedding and the head know.
        d_model: d, width of the residual stream.
        n_layers: L, blocks.
        n_heads: query heads; d_head = d_model / n_heads unless d_head is given.
        n_kv_heads: key and value heads (GQA); 0 means n_heads.
        d_ff: f, inner width of SwiGLU; 0 means 8/3 d_model rounded up to a multiple of d_ff_multiple.
        d_ff_multiple: see d_ff.
        d_head: head size; 0 means d_model / n_heads.
        rope_theta: RoPE base.
        rope_scaling: how RoPE is stretched to longer windows; null for not.
        norm_eps: RMSNorm epsilon.
        tie_embeddings: the head shares the embedding's matrix.
        init_std: standard deviation of normal init of embedding and matrices.
        embedding_init_std: that of the embedding; 0 means init_std. At the high rates of muP an untied embedding wants
            .5 to 1: a rate of 8e-3 scrambles rows of size .1 (.6 nats worse at d_model 32).
        depth_scaled_init: output projections (attention and MLP) use init_std / sqrt(2 L).
        zero_init_head: the head starts at 0, so that the first logits are equal (untied only).
        qk_norm: RMSNorm over each head of queries and keys, before RoPE (Dehghani et al. 2023, arXiv 2302.05442).
        attention_softcap: c in scores <- c tanh(scores / c) (Gemma 2, arXiv 2408.00118, sec. 2); None for none.
        final_softcap: the same for the logits of the next token.
        mup: width-transfer rules; None is the standard parametrisation.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int = 0
    d_ff: int = 0
    d_ff_multiple: int = 16
    d_head: int = 0
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    embedding_init_std: float = 0.0
    depth_scaled_init: bool = True
    zero_init_head: bool = False
    qk_norm: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    mup: MuPConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff_multiple"):
            _require(getattr(self, name) > 0, f"model.{name} must be positive, got {getattr(self, name)}")
        if self.d_head == 0:
            _require(
                self.d_model % self.n_heads == 0,
                f"model.d_model {self.d_model} does not divide by n_heads {self.n_heads}; change one or set d_head",
            )
            object.__setattr__(self, "d_head", self.d_model // self.n_heads)
        if self.n_kv_heads == 0:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.d_ff == 0:
            multiple = self.d_ff_multiple
            object.__setattr__(self, "d_ff", -(-8 * self.d_model // (3 * multiple)) * multiple)
        _require(self.d_head > 0 and self.d_head % 2 == 0, f"model.d_head must be even for RoPE, got {self.d_head}")
        _require(
            self.n_kv_heads > 0 and self.n_heads % self.n_kv_heads == 0,
            f"model.n_heads {self.n_heads} does not divide by n_kv_heads {self.n_kv_heads}",
        )
        _require(self.d_ff > 0, f"model.d_ff must be positive, got {self.d_ff}")
        _require(self.rope_theta > 1, f"model.rope_theta must be above 1, got {self.rope_theta}")
        _require(
            self.rope_scaling is None or self.rope_scaling.kind != "dynamic" or self.d_head > 2,
            "model.rope_scaling.kind dynamic needs a d_head above 2",
        )
        _require(self.init_std > 0, f"model.init_std must be positive, got {self.init_std}")
        _require(
            self.embedding_init_std >= 0,
            f"model.embedding_init_std must not be negative, got {self.embedding_init_std}",
        )
        for name in ("attention_softcap", "final_softcap"):
            cap = getattr(self, name)
            _require(cap is None or cap > 0, f"model.{name} must be positive, or null for none, got {cap}")
        _require(
            not (self.tie_embeddings and self.zero_init_head),
            "model.zero_init_head would zero the embedding too when tie_embeddings is on; turn one off",
        )

    @property
    def width_multiplier(self) -> float:
        """m of muP; 1 under the standard parametrisation."""
        return 1.0 if self.mup is None else self.d_model / self.mup.base_width


def model_config_from(values: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig whose dataclasses.asdict is `values`, as a checkpoint holds it.

    Raises:
        ConfigError: a field this version does not know, or a value it does not take.
    """
    unknown = sorted(values.keys() - {field.name for field in fields(ModelConfig)})
    if unknown:
        raise ConfigError(f"model config has {', '.join(unknown)}, which this version does not know; update it")
    mup, scaling = values.get("mup"), values.get("rope_scaling")
    parts = {
        "mup": None if mup is None else MuPConfig(**mup),
        "rope_scaling": None if scaling is None else RopeScaling(**scaling),
    }
    return ModelConfig(**{**values, **parts})


@dataclass(frozen=True)
class RuntimeConfig:
    """How a model is computed; nothing of it changes what is computed, but for rounding.

    Attributes:
        attention: backend, see lm.attention.pack: auto, sdpa, documents, flash or flex.
        compile: compile each block with torch.compile (the same code for all of them). auto is for recipes.build, which
            settles it with lm.runtime.choose; a model that still has it does not compile.
        activation_checkpointing: what backward computes again instead of keeping it. none; full: whole blocks, about a
            third more work, keeps one [B, T, D] a block; selective: all but matrix products and attention.
    """

    attention: str = "auto"
    compile: bool | Literal["auto"] = False
    activation_checkpointing: str = "none"

    def __post_init__(self) -> None:
        _require(
            self.compile in (True, False, "auto"), f"runtime.compile must be auto, true or false, got {self.compile!r}"
        )
        kinds = ("none", "full", "selective")
        _require(
            self.activation_checkpointing in kinds,
            f"runtime.activation_checkpointing must be one of {', '.join(kinds)}, "
            f"got {self.activation_checkpointing!r}",
        )
