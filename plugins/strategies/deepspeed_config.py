"""Extra DeepSpeed settings, merged into those that the strategy and the Trainer make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm.errors import ConfigError

# Who sets a key already; such a key in `config` is refused, since one of the two would silently lose.
_OWNERS = {
    "zero_optimization.stage": "the argument stage",
    "zero_optimization.overlap_comm": "the argument overlap_comm",
    "zero_optimization.reduce_bucket_size": "the argument reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "the argument allgather_bucket_size",
    "gradient_clipping": "trainer.gradient_clip_val",
    "gradient_accumulation_steps": "data.micro_batch_size",
    "train_batch_size": "data.global_batch_tokens",
    "train_micro_batch_size_per_gpu": "data.micro_batch_size",
    "optimizer": "model.optim",
    "scheduler": "model.optim.schedule",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "torch_autocast": "trainer.precision",
}
# What would train, or save, something else than the run.
_REFUSED = {
    "zero_optimization.round_robin_gradients": "under it DeepSpeed takes parameters for one another in checkpoints",
    "zero_optimization.offload_optimizer.device": "offload is to CPU memory; checkpoints do not reach any other place",
    "zero_optimization.offload_param.device": "offload is to CPU memory; checkpoints do not reach any other place",
}
# Sections that only an argument may bring in; it may then be refined.
_SWITCHES = {
    "zero_optimization.offload_optimizer": "offload_optimizer",
    "zero_optimization.offload_param": "offload_parameters",
}


def merge(settings: dict[str, Any], extra: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`settings` with `extra` laid over it, section by section; neither is changed.

    Args:
        settings: made by the strategy.
        extra: a user's, nested as in DeepSpeed's documentation.
        prefix: dotted place of both.

    Raises:
        ConfigError: one line; `extra` has a key that something else sets or that is refused, or a value where a section
            belongs.
    """
    merged = dict(settings)
    for key, value in extra.items():
        place = f"{prefix}{key}"
        if place in _OWNERS:
            raise ConfigError(f"zero config.{place} is set by {_OWNERS[place]}; change that and take it out of config")
        if place in _REFUSED:
            raise ConfigError(f"zero config.{place} is refused: {_REFUSED[place]}; take it out of config")
        if place in _SWITCHES and key not in settings:
            raise ConfigError(f"zero config.{place} refines an offload that is off; set {_SWITCHES[place]}: true")
        section = settings.get(key)
        if isinstance(section, Mapping) != isinstance(value, Mapping) and key in settings:
            kind = "a section of settings" if isinstance(section, Mapping) else "a single value"
            raise ConfigError(f"zero config.{place} must be {kind}, got {value!r}")
        merged[key] = merge(dict(section), value, f"{place}.") if isinstance(section, Mapping) else value
    return merged
