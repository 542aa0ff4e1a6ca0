"""Between files and lm.planner: a plan's YAML becomes a Job, a plan becomes a config of recipes.pretrain."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from lm.config import ModelConfig, model_config_from
from lm.data.options import whole
from lm.errors import ConfigError
from lm.plan import DEFAULT_FLOP_CONVENTION, tokens_for_budget
from lm.planner.job import Cluster, Job, check_numbers
from lm.planner.layout import CHECKPOINTING, STRATEGIES, Layout
from lm.planner.memory import device_type_of
from lm.planner.shapes import SHAPES, shape_for
from lm.planner.sizes import Surface, surface_from
from recipes.files import write_text

_KEYS = {field.name for field in fields(Job)} - {"surface"} | {"loss", "budget_flops", "vocab_size"}
_SAME = ("name", "precision", "lr", "warmup_steps", "schedule", "flops_convention", "data_dir", "inference_tokens")


def override(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with dotted keys set: {"cluster.devices": 128}."""
    changed: dict[str, Any] = copy.deepcopy(dict(values))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = changed
        for name in path:
            if not isinstance(place.setdefault(name, {}), dict):
                raise ConfigError(f"{key}: {name} holds a value, not a section")
            place = place[name]
        place[last] = value
    return changed


def job_from(values: Mapping[str, Any]) -> Job:
    """The job that a plan's values describe.

    Raises:
        ConfigError: one line: what is wrong, where, what to do.
    """
    _known("", values, _KEYS)
    for key in ("cluster", "sequence_length", "global_batch_tokens"):
        if values.get(key) is None:
            raise ConfigError(f"a plan needs {key}; see conf/plan/llama_7b.yaml")
    surface = surface_from(values["loss"]) if values.get("loss") is not None else None
    sizes = {key: values[key] for key in ("sequence_length", "global_batch_tokens")}
    check_numbers("", sizes, whole=True)
    model, tokens = model_and_tokens(values, surface)
    return Job(
        model=model,
        tokens=tokens,
        sequence_length=int(sizes["sequence_length"]),
        global_batch_tokens=int(sizes["global_batch_tokens"]),
        cluster=_cluster(values["cluster"]),
        sources=_sources({} if values.get("sources") is None else values["sources"]),
        surface=surface,
        layout=_layout({} if values.get("layout") is None else values["layout"]),
        **{"name": "plan", **{key: values[key] for key in _SAME if values.get(key) is not None}},
    )


def model_and_tokens(values: Mapping[str, Any], surface: Surface | None) -> tuple[ModelConfig, float]:
    """Both as given; or tokens from budget_flops; or, with a fitted loss and no model, the compute-optimal of both."""
    tokens, budget = values.get("tokens"), values.get("budget_flops")
    if (tokens is None) == (budget is None):
        raise ConfigError("a plan needs either tokens or budget_flops")
    if values.get("model") is not None:
        model = _model(values["model"])
        if tokens is None:
            check_numbers("", {"budget_flops": budget})
            assert budget is not None
            convention = values.get("flops_convention") or DEFAULT_FLOP_CONVENTION
            tokens = tokens_for_budget(model, float(budget), int(values["sequence_length"]), convention)
        return model, tokens
    if surface is None or budget is None or values.get("vocab_size") is None:
        raise ConfigError("a plan needs a model; or budget_flops, loss and vocab_size, and it takes the optimal one")
    check_numbers("", {"budget_flops": budget, "vocab_size": values["vocab_size"]})
    n_params, tokens = surface.optimum(float(budget))
    return shape_for(n_params, int(values["vocab_size"])), tokens


def _model(values: Any) -> ModelConfig:
    if not isinstance(values, Mapping):
        raise ConfigError(f"model must be {{shape: NAME}} or the fields of model.config, got {values!r}")
    rest = {str(key): value for key, value in values.items() if key != "shape"}
    shape = values.get("shape")
    if shape is not None and shape not in SHAPES:
        raise ConfigError(f"model.shape {shape!r} is unknown; take one of {', '.join(SHAPES)}, or give the fields")
    if shape is not None:
        base = {field.name: getattr(SHAPES[shape], field.name) for field in fields(ModelConfig)}
        if {"d_model", "n_heads"} & rest.keys():
            del base["d_head"]  # it follows from the two, unless given
        rest = {**base, **rest}
    missing = [field.name for field in fields(ModelConfig) if field.default is MISSING and field.name not in rest]
    if missing:
        raise ConfigError(f"model lacks {', '.join(missing)}")
    needed, sizes = ("vocab_size", "d_model", "n_layers", "n_heads"), ("n_kv_heads", "d_ff", "d_head")
    for name in (*needed, *(size for size in sizes if rest.get(size) is not None)):
        check_numbers("model.", {name: rest[name]}, whole=True)
    return model_config_from({name: whole(value) for name, value in rest.items()})


def _cluster(values: Any) -> Cluster:
    if not isinstance(values, Mapping):
        raise ConfigError(f"cluster must be a section with device and devices, got {values!r}")
    _known("cluster.", values, {field.name for field in fields(Cluster)})
    for key in ("device", "devices"):
        if values.get(key) is None:
            raise ConfigError(f"a plan needs cluster.{key}")
    return Cluster(**{str(key): value for key, value in values.items()})


def _layout(values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"layout must be a section of settings to keep, got {values!r}")
    _known("layout.", values, {field.name for field in fields(Layout)} - {"world"})
    for key, known in (("strategy", STRATEGIES), ("checkpointing", CHECKPOINTING)):
        if key in values and values[key] not in known:
            raise ConfigError(f"layout.{key} must be one of {', '.join(known)}, got {values[key]!r}")
    return dict(values)


def _sources(values: Any) -> dict[str, tuple[float, float]]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"sources must be names with weight and unique_tokens, got {values!r}")
    found = {}
    for name, source in values.items():
        if not isinstance(source, Mapping) or set(source) != {"weight", "unique_tokens"}:
            raise ConfigError(f"sources.{name} must have weight and unique_tokens, got {source!r}")
        found[str(name)] = (source["weight"], source["unique_tokens"])
    return found


def _known(place: str, values: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ConfigError(f"{place}{unknown[0]} is unknown; there are {', '.join(sorted(known))}")


# To recipes.pretrain -----------------------------------------------------------------------------------------------

_CLASSES = {
    "ddp": "plugins.strategies.ddp.DDP",
    "fsdp": "plugins.strategies.fsdp.FSDP",
    "hsdp": "plugins.strategies.hsdp.HSDP",
    **{f"zero{stage}": "plugins.strategies.deepspeed.ZeRO" for stage in (1, 2, 3)},
}
_YOUNG = "plugins.callbacks.young_checkpoint.YoungCheckpoint"


def pretrain_config(job: Job, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Config of `recipes.pretrain fit` for a plan: one micro-batch, schedule and layout, saved as often as pays."""
    layout, run = plan["layout"], plan["run"]
    schedule: dict[str, Any] = {"kind": job.schedule, "warmup_steps": job.warmup}
    schedule |= {"decay_fraction": 0.2, "floor": 0.0} if job.schedule == "wsd" else {"floor": 0.1}
    return {
        "name": job.name,
        "tokens": float(job.tokens),
        "model": {
            "config": _shape_values(job.model),
            "runtime": {"activation_checkpointing": layout["checkpointing"]},
            "optim": {"lr": run["lr"], "betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": schedule},
        },
        "data": {
            "dir": job.data_dir,
            "sequence_length": job.sequence_length,
            "global_batch_tokens": job.global_batch_tokens,
            "micro_batch_size": layout["micro_batch"],
            **({"weights": {name: weight for name, (weight, _) in job.sources.items()}} if job.sources else {}),
        },
        "trainer": {
            "accelerator": device_type_of(job),
            "devices": job.cluster.devices_per_node,
            "num_nodes": job.cluster.devices // job.cluster.devices_per_node,
            "strategy": strategy_values(layout),
            "precision": job.precision,
            "callbacks+": [
                {
                    "class_path": _YOUNG,
                    "init_args": {"failures_per_device_day": job.cluster.failures_per_device_day, "keep": 2},
                }
            ],
        },
    }


def strategy_values(layout: Mapping[str, Any]) -> Any:
    """trainer.strategy of a layout: a name, or a class with arguments."""
    name = layout["strategy"]
    arguments: dict[str, Any] = {}
    if name == "hsdp":
        arguments |= {"replicate": layout["replicate"], "shard": layout["shard"]}
    if layout["tensor"] > 1:
        arguments["tensor_parallel"] = layout["tensor"]
    if layout["context"] > 1:
        arguments["context_parallel"] = layout["context"]
    if layout["reduce_every"]:
        arguments["reduce_every_micro_batch"] = True
    if not arguments:
        return name
    if name.startswith("zero"):
        arguments["stage"] = int(name[-1])
    return {"class_path": _CLASSES[name], "init_args": arguments}


def _shape_values(config: ModelConfig) -> dict[str, Any]:
    """Fields that are not at their default; sizes always."""
    always = {"vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff"}
    values = {}
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        derived = field.name == "d_head" and value * config.n_heads == config.d_model
        if field.name in always or (value != field.default and not derived):
            values[field.name] = dict(vars(value)) if hasattr(value, "__dataclass_fields__") else value
    return values


def write_config(config: Mapping[str, Any], path: Path, command: str) -> None:
    """YAML with a first line that says how it was made."""
    import yaml

    write_text(path, f"# Made by: {command}\n" + yaml.safe_dump(dict(config), sort_keys=False))
