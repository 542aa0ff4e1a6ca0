"""To and from Hugging Face's LlamaForCausalLM: names, config.json, and what muP's factors become.

Both keep RoPE pairs (i, i + E/2), so no matrix is permuted. Standard library only; tensors are lm/hf_weights.py's.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.rope_scaling import RopeScaling, yarn_attention

_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.w_gate.weight": "mlp.gate_proj.weight",
    "mlp.w_up.weight": "mlp.up_proj.weight",
    "mlp.w_down.weight": "mlp.down_proj.weight",
}

# Fields that a Hugging Face folder decides; the others (initial values, muP) are the run's own.
HF_FIELDS = (
    *("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "norm_eps", "tie_embeddings"),
    *("rope_theta", "rope_scaling", "qk_norm", "attention_softcap", "final_softcap"),
)

# Settings of config.json that change the model into one this package does not have, and the values that do not.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "hidden_act": ("silu", "swish"),
    "sliding_window": (None,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def hf_name(name: str) -> str:
    """Hugging Face's name of a parameter of lm.model.Llama."""
    if name in _TOP:
        return _TOP[name]
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if found is None or found[2] not in _IN_BLOCK:
        raise ConfigError(f"Hugging Face's Llama has no parameter like {name}; it cannot be exported")
    return f"model.layers.{found[1]}.{_IN_BLOCK[found[2]]}"


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by name of all parameters of lm.model.Llama that Hugging Face's has too, in the order of the model."""
    D, E, F = config.d_model, config.d_head, config.d_ff
    inner = {
        "attention_norm.weight": (D,),
        "attention.wq.weight": (config.n_heads * E, D),
        "attention.wk.weight": (config.n_kv_heads * E, D),
        "attention.wv.weight": (config.n_kv_heads * E, D),
        "attention.wo.weight": (D, config.n_heads * E),
        "mlp_norm.weight": (D,),
        "mlp.w_gate.weight": (F, D),
        "mlp.w_up.weight": (F, D),
        "mlp.w_down.weight": (D, F),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, D)}
    for block in range(config.n_layers):
        shapes.update({f"blocks.{block}.{name}": shape for name, shape in inner.items()})
    shapes["norm.weight"] = (D,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, D)
    return shapes


def export_factor(name: str, config: ModelConfig) -> float:
    """What a parameter is multiplied with on export, so that a model without muP gives the same logits.

    Scores: Hugging Face divides by sqrt(E), muP multiplies by sqrt(base_d_head) / E: the ratio goes into wq, which
    RoPE leaves linear. Logits: the 1 / m goes into the gain of the last norm, in front of the head, and not into the
    head, which may be the embedding. Both are 1 under the standard parametrisation.
    """
    if config.mup is None:
        return 1.0
    if name.endswith("attention.wq.weight"):
        return math.sqrt(config.mup.base_d_head / config.d_head)
    return 1 / config.width_multiplier if name == "norm.weight" else 1.0


def check_exportable(config: ModelConfig) -> None:
    """Raise ConfigError when LlamaForCausalLM cannot compute what this model computes."""
    for field, off in (("qk_norm", False), ("attention_softcap", None), ("final_softcap", None)):
        value = getattr(config, field, off)
        if value != off:
            raise ConfigError(
                f"model.config.{field} is {value}, which Hugging Face's Llama does not have: "
                "the exported model would give other logits; train without it to export"
            )
    if config.d_model % config.n_heads != 0:
        raise ConfigError(
            f"Hugging Face's Llama wants hidden_size to divide by the heads; d_model {config.d_model} does not "
            f"divide by n_heads {config.n_heads}"
        )


def to_hf_config(config: ModelConfig, max_position: int, eos_token_id: int | None, dtype: str) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM that computes the same function (see export_factor).

    RoPE is written twice, as transformers 5 reads it (rope_parameters) and as older readers do (rope_theta,
    rope_scaling).

    Args:
        max_position: sequence length the model was trained for. Dynamic scaling writes its original length instead,
            and YaRN factor times that: transformers computes with the first, and checks the second.
        eos_token_id: end-of-text.
        dtype: float32 or bfloat16.

    Raises:
        ConfigError: see check_exportable.
    """
    check_exportable(config)
    rope = _to_rope_parameters(config.rope_scaling)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "max_position_embeddings": _max_position(config.rope_scaling, max_position),
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": None,  # attention never crosses into a document, so none begins with a token of its own
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _max_position(scaling: RopeScaling | None, max_position: int) -> int:
    if scaling is not None and scaling.kind == "dynamic":
        return scaling.original_max_position
    if scaling is not None and scaling.kind == "yarn":
        return round(scaling.factor * scaling.original_max_position)
    return max_position


def _to_rope_parameters(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": float(scaling.factor)}
    if scaling.kind in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        if scaling.attention_factor is not None:
            values["attention_factor"] = scaling.attention_factor
    return values


def from_hf_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json, of transformers 5 or older.

    Args:
        values: the file's content.
        where: the file's path, for errors.

    Raises:
        ConfigError: another architecture, a setting that lm.model.Llama does not have, a missing or nonsensical size.
    """
    _check_architecture(values, where)
    for key, accepted in _REFUSED.items():
        if key in values and values[key] not in accepted:
            raise ConfigError(f"{where}: {key} is {values[key]!r}, which this model does not have; {key} must be off")
    missing = [key for key in _REQUIRED if key not in values]
    if missing:
        raise ConfigError(f"{where} has no {', '.join(missing)}: it is no Llama's config.json")
    try:
        theta, scaling = _from_rope(values, where)
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: rope scaling: {error}") from None
    try:
        return ModelConfig(
            vocab_size=int(values["vocab_size"]),
            d_model=int(values["hidden_size"]),
            n_layers=int(values["num_hidden_layers"]),
            n_heads=int(values["num_attention_heads"]),
            n_kv_heads=int(values.get("num_key_value_heads") or 0),
            d_ff=int(values["intermediate_size"]),
            d_head=int(values.get("head_dim") or 0),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_architecture(values: Mapping[str, Any], where: str) -> None:
    kind, names = values.get("model_type"), values.get("architectures") or []
    if kind == "mistral":
        # The same computation, but for defaults of keys that are left out.
        if "sliding_window" in values and "num_key_value_heads" in values:
            return
        raise ConfigError(f"{where}: a Mistral is read only with sliding_window null and num_key_value_heads given")
    if kind != "llama" or any(name != "LlamaForCausalLM" for name in names):
        raise ConfigError(f"{where}: model_type {kind}, architectures {names}: only LlamaForCausalLM can be read")


def _from_rope(values: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """(base, scaling) from rope_parameters (transformers 5), else from rope_theta and rope_scaling."""
    given = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = float(given.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind == "default":
        return theta, None
    # transformers' dynamic scaling starts from max_position_embeddings, and has that for the others' default.
    original = int(values.get("max_position_embeddings", 2048))
    if kind != "dynamic":
        original = int(given.get("original_max_position_embeddings") or original)
    if kind == "yarn" and given.get("truncate") is False:
        raise ConfigError(f"{where}: rope scaling yarn with truncate false is not supported")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor {given['partial_rotary_factor']} is not supported")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    options = {key: float(given[key]) for key in optional if given.get(key) is not None}
    try:
        factor = float(given["factor"])
        return theta, RopeScaling(
            kind=kind,
            factor=factor,
            original_max_position=0 if kind == "linear" else original,
            attention_factor=_attention_factor(given, factor) if kind == "yarn" else None,
            **options,
        )
    except (KeyError, TypeError, ConfigError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{where}: rope scaling {kind}: {what}") from None


def _attention_factor(given: Mapping[str, Any], factor: float) -> float | None:
    """YaRN's explicit attention factor, also from DeepSeek's mscale and mscale_all_dim; None for the paper's."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
    return yarn_attention(factor, mscale) / yarn_attention(factor, all_dim) if mscale and all_dim else None


def disagreements(config: ModelConfig, hf: ModelConfig) -> list[str]:
    """Lines "field is A here, B in the folder" for the fields that a Hugging Face folder decides."""
    here, there = dataclasses.asdict(config), dataclasses.asdict(hf)
    return [
        f"{field} is {here[field]}, the folder has {there[field]}"
        for field in HF_FIELDS
        if field in here and here[field] != there[field]
    ]
