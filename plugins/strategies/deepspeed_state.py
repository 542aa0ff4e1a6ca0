"""Every use of DeepSpeed's private interface: gradient norm, discarded gradients, states by parameter name.

Written against deepspeed 0.19.8 (pinned). `zero` is the engine's DeepSpeedZeroOptimizer (stages 1 and 2) or
DeepSpeedZeroOptimizer_Stage3; its `.optimizer` is the torch optimizer over flat fp32 partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plugins.strategies import checkpoint_io, collectives, state

_LOAD_ELEMENTS = 1 << 28  # whole tensors held at once while loading: 1 GiB in fp32


# Gradients ----------------------------------------------------------------------------------------------------------


def global_grad_norm(zero: Any) -> Tensor:
    """Norm of all gradients before clipping, 0-dimensional fp32; inf when it is not finite. Collective.

    Call it after the backward pass of the last micro-batch and before engine.step().
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    norm = combine_grad_norm_groups(zero._get_norm_groups()) if is_stage_3(zero) else zero.scaled_global_norm()
    return (norm / zero.loss_scale).detach().float()


def discard_gradients(engine: Any) -> None:
    """Forget the gradients of this optimizer step, as DeepSpeed itself does after an overflow."""
    zero = engine.optimizer
    if is_stage_3(zero):
        zero._pre_step()
        zero._overflow_clean_up(zero.loss_scale)
    else:
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        zero.micro_step_id = INITIAL_MICRO_STEP_ID
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        for index in zero.averaged_gradients:
            zero.averaged_gradients[index] = None
            zero.all_grad_tensors[index] = None
        zero._epilogue_ran_this_backward = False
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        zero.reset_cpu_buffers()
    engine.micro_steps += 1


# Reading ------------------------------------------------------------------------------------------------------------


def is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def flat_groups(zero: Any) -> list[tuple[list[nn.Parameter], nn.Parameter]]:
    """(parameters, this rank's flat fp32 partition of them) of each group or, under stage 3, sub-group."""
    if is_stage_3(zero):
        return list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
    return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))


def group_names(module: nn.Module, zero: Any) -> list[list[str]]:
    """Names of the parameters of each of the optimizer's groups."""
    names = {id(parameter): name for name, parameter in state.named_parameters(module).items()}
    if not is_stage_3(zero):
        return [[names[id(parameter)] for parameter in group] for group in zero.bit16_groups]
    groups: list[list[str]] = [[] for _ in zero.optimizer.param_groups]
    for index, group in enumerate(zero.fp16_groups):
        groups[zero.sub_group_to_group_id[index]].extend(names[id(parameter)] for parameter in group)
    return groups


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of an engine without optimizer, whole. Collective under stage 3."""
    tensors = {f"buffer/{name}": buffer for name, buffer in state.persistent_buffers(module).items()}
    for name, parameter in state.named_parameters(module).items():
        with _gathered([parameter], writing=False):
            tensors[f"param/{name}"] = parameter.detach().cpu().clone()
    return tensors


def collect(module: nn.Module, zero: Any, with_optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """(whole tensors by checkpoint key, kept on one rank each; the optimizer's other state). Collective.

    Tensors are assembled one at a time, and each rank keeps every world-th, so that no rank holds the whole model.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    _relink(zero)
    flat_of = {id(parameter): flat for group, flat in flat_groups(zero) for parameter in group}
    rank, world = collectives.rank(), collectives.world_size()
    tensors: dict[str, Tensor] = {f"buffer/{n}": buffer for n, buffer in state.persistent_buffers(module).items()}
    scalars: dict[str, dict] = {}
    for index, (name, parameter) in enumerate(state.named_parameters(module).items()):
        flat = flat_of.get(id(parameter))
        if flat is None:  # frozen: the optimizer does not know it
            with _gathered([parameter], writing=False):
                tensors[f"param/{name}"] = parameter.detach().cpu().clone()
            continue
        whole = {f"param/{name}": safe_get_full_fp32_param(parameter)}
        if with_optimizer:
            moments, scalars[name] = state.split_state(flat.shape, zero.optimizer.state.get(flat, {}))
            for key in moments:
                whole[f"optim/{name}/{key}"] = safe_get_full_optimizer_state(parameter, key)
        if index % world == rank:
            tensors.update({key: value.detach().cpu().clone() for key, value in whole.items()})
    if not with_optimizer:
        return tensors, None
    return tensors, state.describe_optimizer(group_names(module, zero), zero.optimizer, scalars)


# Writing ------------------------------------------------------------------------------------------------------------


def load_plain(module: nn.Module, reader: checkpoint_io.Reader) -> None:
    """Weights of an engine without optimizer. Collective."""
    parameters = state.named_parameters(module)
    for names in _chunks(parameters):
        tensors = _empty([(f"param/{name}", state.shape_of(parameters[name])) for name in names])
        reader.load(tensors)
        chosen = [parameters[name] for name in names]
        with _gathered(chosen, writing=True), torch.no_grad():
            for name in names:
                parameters[name].copy_(tensors[f"param/{name}"])


def load(module: nn.Module, zero: Any, reader: checkpoint_io.Reader) -> None:
    """Weights and optimizer state into the flat partitions. Collective; every rank reads whole tensors."""
    parameters = state.named_parameters(module)
    keys = state.saved_state_keys(reader.metadata)
    _create_states(module, zero, keys, reader.rest["optimizer"]["scalars"])
    if is_stage_3(zero):
        zero._partition_all_parameters()  # small parameters are kept whole and would survive the load
    _relink(zero)
    for names in _chunks(parameters):
        shapes = []
        for name in names:
            shape = state.shape_of(parameters[name])
            shapes.append((f"param/{name}", shape))
            shapes.extend((f"optim/{name}/{key}", shape) for key in keys.get(name, {}))
        tensors = _empty(shapes)
        reader.load(tensors)
        for key, whole in tensors.items():
            kind, name, optim_key = _parse(key)
            _set_whole(zero, parameters[name], whole, optim_key if kind == "optim" else None)
    _publish(zero)


def scale_rows(zero: Any, items: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply each row of each matrix by its factor, [rows], the same on all ranks. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    if is_stage_3(zero):
        zero._partition_all_parameters()  # see load
    for parameter, factor in items:
        whole = safe_get_full_fp32_param(parameter)
        _set_whole(zero, parameter, whole * factor[:, None].to(whole), None)
    _publish(zero)


def _create_states(module: nn.Module, zero: Any, keys: dict[str, dict], scalars: dict[str, dict]) -> None:
    """Zero states for each flat partition, of the kinds the checkpoint holds for its parameters."""
    names = {id(parameter): name for name, parameter in state.named_parameters(module).items()}
    zero.optimizer.state.clear()
    for index, (parameters, flat) in enumerate(flat_groups(zero)):
        name = names[id(parameters[0])]
        group = zero.optimizer.param_groups[zero.sub_group_to_group_id[index] if is_stage_3(zero) else index]
        flat_state: dict[str, Any] = {key: torch.zeros_like(flat) for key in keys.get(name, {})}
        for key, value in scalars.get(name, {}).items():
            flat_state[key] = state.place_scalar(value, group, flat.device)
        if flat_state:
            zero.optimizer.state[flat] = flat_state


def _set_whole(zero: Any, parameter: Any, whole: Tensor, optim_key: str | None) -> None:
    """Copy this rank's part of a whole fp32 tensor into the flat partition of weights or of one optimizer state."""
    if not is_stage_3(zero):
        if not hasattr(parameter, "_hp_mapping"):  # frozen
            parameter.data.copy_(whole)
            return
        parameter.set_full_hp_param(whole, optim_key)
        return
    if not parameter.requires_grad:
        with _gathered([parameter], writing=True), torch.no_grad():
            parameter.copy_(whole)
        return
    # Not DeepSpeed's setter: it fails when the size does not divide by the ranks.
    part = zero._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=optim_key)[0].data
    start = part.numel() * zero._get_param_partition_rank(parameter)
    mine = whole.flatten()[start : start + part.numel()]
    part.zero_()
    part[: mine.numel()].copy_(mine)


def _publish(zero: Any) -> None:
    """Make the parameters used in forward equal to the fp32 partitions just written."""
    if not is_stage_3(zero):
        zero.update_lp_params()
        return
    for index in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
    zero.invalidate_secondary_tensor()


def _relink(zero: Any) -> None:
    """Stages 1 and 2: point each parameter at its piece of the flat states; DeepSpeed links the first group only."""
    if not is_stage_3(zero) and all(flat in zero.optimizer.state for _, flat in flat_groups(zero)):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _gathered(parameters: list[nn.Parameter], writing: bool) -> Any:
    """Context in which stage-3 parameters are whole; what rank 0 writes is sent to the others."""
    import deepspeed

    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    return deepspeed.zero.GatheredParameters(
        partitioned, modifier_rank=0 if writing else None, enabled=bool(partitioned)
    )


def _empty(shapes: list[tuple[str, torch.Size]]) -> dict[str, Tensor]:
    return {key: torch.empty(shape, dtype=torch.float32) for key, shape in shapes}


def _parse(key: str) -> tuple[str, str, str]:
    """'optim/a.b/exp_avg' -> (optim, a.b, exp_avg); 'param/a.b' -> (param, a.b, '')."""
    kind, _, rest = key.partition("/")
    if kind == "param":
        return kind, rest, ""
    name, _, optim_key = rest.rpartition("/")
    return kind, name, optim_key


def _chunks(parameters: dict[str, nn.Parameter]) -> Iterator[list[str]]:
    """Names in groups of at most _LOAD_ELEMENTS elements, single large parameters aside."""
    chunk: list[str] = []
    elements = 0
    for name, parameter in parameters.items():
        size = state.shape_of(parameter).numel()
        if chunk and elements + size > _LOAD_ELEMENTS:
            yield chunk
            chunk, elements = [], 0
        chunk.append(name)
        elements += size
    if chunk:
        yield chunk
