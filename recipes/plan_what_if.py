"""What if: other devices, context, precision or model, each planned anew and held against the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm.errors import ConfigError
from lm.planner.plan import make_plan
from recipes.plan_config import job_from, override


def changes_of(values: Mapping[str, Any], asked: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Changes by title; the usual four where none are asked for."""
    if asked:
        return {", ".join(f"{key} {value}" for key, value in changes.items()): dict(changes) for changes in asked}
    job = job_from(values)
    larger = {"shape": "llama_2_13b", "vocab_size": job.model.vocab_size, "tie_embeddings": job.model.tie_embeddings}
    usual: dict[str, dict[str, Any]] = {"32k context": {"sequence_length": 32_768}}
    devices = job.cluster.devices // 2
    if devices:
        usual = {
            "half the devices": {
                "cluster.devices": devices,
                "cluster.devices_per_node": min(job.cluster.devices_per_node, devices),
            },
            **usual,
        }
    return {**usual, "fp8": {"precision": "fp8"}, "13B": {"model": larger, "tokens": job.tokens}}


def compare(
    values: Mapping[str, Any], base: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A row for the base, then one a change: its figures, or why it cannot be."""
    rows = [{"what": "base", **row(base)}]
    for title, change in changes.items():
        try:
            changed = override(values, change)
            if change.get("tokens") is not None:
                changed.pop("budget_flops", None)
            rows.append({"what": title, **row(make_plan(job_from(changed)))})
        except ConfigError as error:
            rows.append({"what": title, "error": str(error)})
    return rows


def row(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a plan that a decision looks at."""
    time, step = plan["time_and_cost"], plan["step"]
    return {
        "n_params": plan["parameters"]["total"],
        "flops": plan["flops"]["conventions"][plan["flops"]["convention"]]["run"],
        "days": time["days"],
        "device_hours": time["device_hours"],
        "cost_with_allowance": time["cost_with_allowance"],
        "step_seconds": step["seconds"],
        "mfu": step["mfu"],
        "memory_bytes": plan["memory"]["total_bytes"],
        "interruptions": plan["reliability"]["expected_interruptions"],
        "loss": plan["loss"]["predicted"] if plan["loss"] else None,
        "layout": plan["layout"]["describe"],
    }
