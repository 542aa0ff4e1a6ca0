"""What of a model and its optimizer goes into a checkpoint, keyed by parameter name.

Tensors:  param/<name>, buffer/<name> (persistent ones), optim/<name>/<state> for every optimizer state that has its
parameter's shape (exp_avg, exp_avg_sq, momentum_buffer, ...).
The rest, in a dictionary: the optimizer's class, its scalar states by parameter name (step), and its groups.

Names are the LightningModule's own, so they do not depend on the strategy; wrappers' prefixes are cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from plugins.strategies.checkpoint import CheckpointError

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# Where the schedule had got to is restored; what the configuration says about the rest (weight decay, betas) holds.
_RESTORED_HYPERPARAMETERS = ("lr", "initial_lr")


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and activation checkpointing."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by clean name; a shared (tied) parameter once, under its first name."""
    return {clean_name(name): parameter for name, parameter in module.named_parameters()}


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers by clean name, but those registered with persistent=False."""
    buffers = {}
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in child._non_persistent_buffers_set:
                buffers[clean_name(name)] = buffer
    return buffers


def shape_of(parameter: Tensor) -> torch.Size:
    """The whole parameter's shape, also for a DTensor and under ZeRO-3."""
    return getattr(parameter, "ds_shape", parameter.shape)


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Live tensors of parameters and persistent buffers by checkpoint key: read to save, written to load."""
    tensors = {f"param/{name}": parameter.detach() for name, parameter in named_parameters(module).items()}
    tensors.update({f"buffer/{name}": buffer for name, buffer in persistent_buffers(module).items()})
    return tensors


def split_state(shape: torch.Size, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Optimizer state of one parameter as (tensors of the parameter's shape, scalars).

    Raises:
        CheckpointError: a state is neither; this checkpoint format has no place for it.
    """
    tensors, scalars = {}, {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != shape:
                raise CheckpointError(
                    f"optimizer state {key!r} has shape {tuple(value.shape)}, its parameter {tuple(shape)}; "
                    "checkpoints hold states of the parameter's shape and scalars only"
                )
            tensors[key] = value
        else:
            scalars[key] = value.detach().cpu() if isinstance(value, Tensor) else value
    return tensors, scalars


def optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict]]:
    """(tensors by checkpoint key, scalar states by parameter name) of an ordinary optimizer."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict] = {}
    for name, parameter in named_parameters(module).items():
        own, scalars[name] = split_state(parameter.shape, optimizer.state.get(parameter, {}))
        tensors.update({f"optim/{name}/{key}": value for key, value in own.items()})
    return tensors, scalars


def describe_optimizer(names: list[list[str]], optimizer: Optimizer, scalars: dict[str, dict]) -> dict[str, Any]:
    """The optimizer's part of the checkpoint that is no tensor.

    Args:
        names: parameter names of each group.
        scalars: scalar states by parameter name.
    """
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "names": group_names}
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": scalars}


def group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of each group of an ordinary optimizer."""
    names = {id(parameter): name for name, parameter in named_parameters(module).items()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer, names: list[list[str]]) -> None:
    """Raise CheckpointError when the saved optimizer cannot continue in this one."""
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved['class']}, this run optimizes with {type(optimizer).__name__}; "
            "use the same optimizer or start a new run from its weights"
        )
    if [sorted(group["names"]) for group in saved["groups"]] != [sorted(group) for group in names]:
        raise CheckpointError(
            "the checkpoint's optimizer groups hold other parameters than this run's; use the same grouping rules"
        )


def restore_groups(saved: Mapping[str, Any], optimizer: Optimizer) -> list[str]:
    """Give the groups their learning rates back; return a line for each other hyperparameter that differs."""
    differences = []
    for index, (old, group) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=True)):
        for key, value in old.items():
            if key in _RESTORED_HYPERPARAMETERS:
                group[key] = value
            elif key in group and key not in ("params", "names") and _plain(group[key]) != _plain(value):
                differences.append(f"group {index}: {key} was {value}, is now {group[key]}")
    return differences


def empty_optimizer_state(
    module: nn.Module, optimizer: Optimizer, metadata: Metadata, scalars: Mapping[str, Mapping]
) -> dict[str, Tensor]:
    """Create the states the checkpoint holds, zero and placed like their parameters, and return them by key."""
    keys = saved_state_keys(metadata)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    tensors: dict[str, Tensor] = {}
    optimizer.state.clear()
    for name, parameter in named_parameters(module).items():
        state = {key: torch.zeros_like(parameter, dtype=dtype) for key, dtype in keys.get(name, {}).items()}
        tensors.update({f"optim/{name}/{key}": value for key, value in state.items()})
        for key, value in scalars.get(name, {}).items():
            state[key] = place_scalar(value, group_of.get(id(parameter), {}), parameter.device)
        if state:
            optimizer.state[parameter] = state
    return tensors


def place_scalar(value: Any, group: Mapping[str, Any], device: torch.device) -> Any:
    """A scalar state where torch.optim wants it: a fused or capturable optimizer counts steps on the device."""
    if not isinstance(value, Tensor):
        return value
    on_device = group.get("fused") or group.get("capturable")
    # A copy: a ZeRO checkpoint holds one step count for all parameters of a group, and fused AdamW counts in place.
    return value.to(device, copy=True) if on_device else value.clone()


def saved_state_keys(metadata: Metadata) -> dict[str, dict[str, torch.dtype]]:
    """{parameter name: {state: dtype}} of the optimizer tensors in a checkpoint."""
    keys: dict[str, dict[str, torch.dtype]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith("optim/") and isinstance(entry, TensorStorageMetadata):
            name, _, state = key.removeprefix("optim/").rpartition("/")
            keys.setdefault(name, {})[state] = entry.properties.dtype
    return keys


def check_model(module: nn.Module, metadata: Metadata, strict: bool) -> None:
    """Raise CheckpointError unless the checkpoint has every parameter and buffer of the module, in its shape.

    Args:
        strict: also refuse parameters the module does not know.
    """
    wanted = {f"param/{name}": shape_of(parameter) for name, parameter in named_parameters(module).items()}
    wanted.update({f"buffer/{name}": buffer.shape for name, buffer in persistent_buffers(module).items()})
    saved = {
        key: entry.size
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(("param/", "buffer/")) and isinstance(entry, TensorStorageMetadata)
    }
    for key, shape in wanted.items():
        if key not in saved:
            raise CheckpointError(f"the checkpoint has no {key}; the model differs from the one that was saved")
        if tuple(saved[key]) != tuple(shape):
            raise CheckpointError(f"{key} is {tuple(saved[key])} in the checkpoint, {tuple(shape)} in this model")
    unknown = sorted(saved.keys() - wanted.keys())
    if strict and unknown:
        raise CheckpointError(f"the checkpoint has {unknown[0]}, which this model does not know ({len(unknown)} such)")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value
