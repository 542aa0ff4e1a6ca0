"""Values of a training config that would otherwise end in a traceback, or be taken for something else."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from lm.errors import ConfigError

_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")


def check_values(config: Any) -> None:
    """Refuse, in one line that names the key, what no run can mean.

    Args:
        config: the parsed config of a subcommand, before anything is built.

    Raises:
        ConfigError: the first wrong value.
    """
    _check_name(config.name)
    _check_data(config.data, config.tokens)
    _check_trainer(config.trainer)
    if config.model.optim.schedule.kind == "cooldown" and "ckpt_path" in config and config.ckpt_path is None:
        raise ConfigError("schedule.kind cooldown goes on from a checkpoint: pass --ckpt_path, or take wsd")


def check_seed(seed: int | bool | None) -> None:
    """Raise ConfigError for a seed that NumPy does not take."""
    if isinstance(seed, int) and not 0 <= seed < 1 << 32:
        raise ConfigError(f"seed_everything must be from 0 to {(1 << 32) - 1}, got {seed}")


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ConfigError(f"name {name!r} must name a folder, without / or \\; runs_dir says where it lies")


def _check_data(data: Any, tokens: float) -> None:
    least = {"sequence_length": 1, "global_batch_tokens": 1, "validation_windows": 1, "num_workers": 0, "seed": 0}
    for key, smallest in {**least, "micro_batch_size": 1, "validation_batch_size": 1}.items():
        value = data.get(key)
        if value is not None and value < smallest:
            raise ConfigError(f"data.{key} must be at least {smallest}, got {value}")
    step_tokens = data.batch_ramp[0][1] if data.batch_ramp else data.global_batch_tokens
    if 0 < tokens < step_tokens:
        raise ConfigError(f"tokens {tokens:g} is less than one optimizer step ({step_tokens:g} tokens)")


def _check_trainer(trainer: Any) -> None:
    if isinstance(trainer.accelerator, str) and trainer.accelerator not in _ACCELERATORS:
        raise ConfigError(f"trainer.accelerator must be one of {', '.join(_ACCELERATORS)}, got {trainer.accelerator}")
    if trainer.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(f"trainer.accelerator is {trainer.accelerator} but this machine has no CUDA device; take cpu")
    count_devices(trainer.devices)
    _check_interval(trainer.val_check_interval, "trainer.val_check_interval", "optimizer steps between validations")
    _check_interval(trainer.log_every_n_steps, "trainer.log_every_n_steps", "optimizer steps between logged points")
    if trainer.gradient_clip_val is not None and trainer.gradient_clip_val < 0:
        raise ConfigError(f"trainer.gradient_clip_val must not be negative, got {trainer.gradient_clip_val}")
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            "trainer.accumulate_grad_batches follows from data.micro_batch_size and the number of processes; "
            "set data.micro_batch_size instead"
        )


def _check_interval(value: Any, key: str, what: str) -> None:
    if value is not None and (isinstance(value, float) or value < 1):
        raise ConfigError(f"{key} must be a whole number of {what}, at least 1, got {value}")


def count_devices(devices: Any) -> int | None:
    """Devices that trainer.devices names; None for all there are.

    Raises:
        ConfigError: no number, list or auto.
    """
    if devices in ("auto", -1, "-1"):
        return None
    if isinstance(devices, list) and devices:
        return len(devices)
    text = str(devices)
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if "," in text:
        return len([part for part in text.split(",") if part.strip()])
    raise ConfigError(f"trainer.devices must be a number from 1 on, a list of indices or auto, got {devices!r}")


def set_max_steps(config: Any, steps: int) -> None:
    """tokens decides; a trainer.max_steps that says otherwise is not passed over in silence."""
    given = config.trainer.max_steps
    if given not in (-1, steps):
        print(f"note: trainer.max_steps {given} gives way to tokens {config.tokens:g}: {steps} steps", file=sys.stderr)
    config.trainer.max_steps = steps
    schedule = config.model.optim.schedule
    if schedule.warmup_steps >= steps:
        print(
            f"warning: the learning rate never reaches its peak: {schedule.warmup_steps} warmup steps, {steps} in all",
            file=sys.stderr,
        )


def is_child_rank() -> bool:
    """True in every process but the first: only that one may judge the run folder, before it writes there."""
    return int(os.environ.get("LOCAL_RANK", 0)) > 0 or int(os.environ.get("RANK", 0)) > 0
