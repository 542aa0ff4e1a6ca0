"""A whole plan of a job, as plain values: what `recipes.plan --json` prints and the page shows."""

from __future__ import annotations

import dataclasses
from typing import Any

from lm.config import ModelConfig
from lm.data.epochs import MAX_EPOCHS
from lm.plan import FLOP_CONVENTIONS, count_parameters, training_flops
from lm.planner import reliability
from lm.planner.activations import logits_bytes
from lm.planner.communication import Transfer
from lm.planner.devices import as_values
from lm.planner.job import Job
from lm.planner.memory import DeviceMemory, adam_state_bytes
from lm.planner.reliability import DAY_SECONDS
from lm.planner.search import Candidate, Choice, search
from lm.planner.timing import attention_share, layout_transfers, seconds_of
from lm.planner.ways import pipeline, ways

HOUR_SECONDS = 3600.0


def make_plan(job: Job) -> dict[str, Any]:
    """All figures of a job; keys end in the unit.

    Raises:
        ConfigError: see lm.planner.search.search.
    """
    choice = search(job)
    return {
        "name": job.name,
        "model": dataclasses.asdict(job.model),
        "cluster": cluster_values(job),
        "parameters": parameters(job.model),
        "flops": flops(job),
        "run": run_values(job),
        "layout": layout_values(choice.best),
        "choice": choice_values(choice),
        "memory": memory_values(job, choice.best.memory),
        "step": step_values(job, choice.best),
        "communication": [transfer_values(job, transfer) for transfer in layout_transfers(job, choice.best.layout)],
        "ways": [dataclasses.asdict(way) for way in ways(job, choice.best.layout.micro_batch)],
        "pipeline": pipeline(job, choice.best.layout.micro_batch),
        "time_and_cost": time_and_cost(job, choice.best.time.total),
        "reliability": reliability_values(job, choice.best.time.total),
        "data": data_values(job),
        "loss": loss_values(job),
    }


def cluster_values(job: Job) -> dict[str, Any]:
    """The cluster and its device."""
    values = {field.name: getattr(job.cluster, field.name) for field in dataclasses.fields(job.cluster)}
    return {**values, "price_per_hour": list(job.cluster.price_per_hour), "spec": as_values(job.cluster.spec)}


def parameters(config: ModelConfig) -> dict[str, int]:
    """By part, and under each convention."""
    count = count_parameters(config)
    parts = {name: getattr(count, name) for name in ("embedding", "attention", "mlp", "norms", "head")}
    layer = {"attention_layer": count.attention // config.n_layers, "mlp_layer": count.mlp // config.n_layers}
    return {
        **parts, **layer, "total": count.total, "without_norms": count.total - count.norms, "matmul": count.matmul,
        "non_embedding": count.non_embedding,
    }  # fmt: skip


def flops(job: Job) -> dict[str, Any]:
    """A token's and the run's under each convention, and attention's share."""
    by_name = {
        name: {
            "per_token": rule(job.model, job.sequence_length),
            "run": training_flops(job.model, job.tokens, job.sequence_length, name),
        }
        for name, rule in FLOP_CONVENTIONS.items()
    }
    share = attention_share(job.model, job.sequence_length)
    return {"conventions": by_name, "convention": job.flops_convention, "attention_share": share}


def run_flops(job: Job) -> float:
    """C of the job under its convention."""
    return training_flops(job.model, job.tokens, job.sequence_length, job.flops_convention)


def peak_lr(n_params: float) -> float:
    """Peak learning rates in use: 3e-4 up to 13B, 1.5e-4 up to 70B, 8e-5 beyond (Llama 1 to 3)."""
    return 3e-4 if n_params < 2e10 else 1.5e-4 if n_params < 1e11 else 8e-5


def run_values(job: Job) -> dict[str, Any]:
    """Tokens, batch, steps, schedule."""
    return {
        "tokens": job.tokens,
        "tokens_per_parameter": job.tokens / count_parameters(job.model).total,
        "sequence_length": job.sequence_length,
        "global_batch_tokens": job.global_batch_tokens,
        "windows": job.sequences,
        "steps": job.steps,
        "schedule": job.schedule,
        "warmup_steps": job.warmup,
        "warmup_share": job.warmup / job.steps,
        "lr": job.lr or peak_lr(count_parameters(job.model).total),
        "precision": job.precision,
    }


def layout_values(candidate: Candidate) -> dict[str, Any]:
    """The layout with its derived sizes."""
    layout = candidate.layout
    return {
        **dataclasses.asdict(layout),
        "replicate": layout.replicate,
        "data_parallel": layout.data_parallel,
        "describe": layout.describe(),
    }


def choice_values(choice: Choice) -> dict[str, Any]:
    """Reasons and runners-up."""
    return {
        "reasons": list(choice.reasons),
        "tried": choice.tried,
        "fitting": choice.fitting,
        "runners_up": [
            {
                "describe": other.layout.describe(),
                "step_seconds": other.time.total,
                "memory_bytes": other.memory.total,
                "communication_seconds": other.communication_seconds,
            }
            for other in choice.runners_up
        ],
    }


def memory_values(job: Job, memory: DeviceMemory) -> dict[str, Any]:
    """Bytes a device by part; beside it the whole state and what unchunked logits would take."""
    n_params = count_parameters(job.model).total
    return {
        "parts_bytes": memory.parts,
        "total_bytes": memory.total,
        "usable_bytes": job.cluster.usable_bytes,
        "device_bytes": job.cluster.memory_bytes,
        "whole_state_bytes": adam_state_bytes(n_params),
        "state_bytes": memory.state,
        "unchunked_logits_bytes_per_window": logits_bytes(job.model, job.sequence_length),
    }


def step_values(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Seconds of a step by part, rates, and the MFU that is left."""
    seconds = candidate.time.total
    peak = job.cluster.devices * job.cluster.peak_flops("bf16" if job.mixed else "fp32")
    rate = job.global_batch_tokens / seconds
    return {
        "parts_seconds": candidate.time.parts,
        "seconds": seconds,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate / job.cluster.devices,
        "flops_per_s": run_flops(job) / job.tokens * rate,
        "mfu": run_flops(job) / job.tokens * rate / peak,
    }


def transfer_values(job: Job, transfer: Transfer) -> dict[str, Any]:
    """A transfer with its seconds."""
    (seconds,) = seconds_of(job, [transfer])
    inside = transfer.span <= job.cluster.devices_per_node
    return {**dataclasses.asdict(transfer), "seconds": seconds, "link": "node" if inside else "network"}


def time_and_cost(job: Job, step_seconds: float) -> dict[str, Any]:
    """Days, device-hours and cost, without and with the allowance."""
    seconds = job.tokens / job.global_batch_tokens * step_seconds
    hours = seconds / HOUR_SECONDS * job.cluster.devices
    more = 1 + job.cluster.allowance
    costs = [hours * price for price in job.cluster.price_per_hour]
    return {
        "seconds": seconds,
        "days": seconds / DAY_SECONDS,
        "days_with_allowance": seconds / DAY_SECONDS * more,
        "device_hours": hours,
        "device_hours_with_allowance": hours * more,
        "cost": costs,
        "cost_with_allowance": [cost * more for cost in costs],
        "allowance": job.cluster.allowance,
    }


def reliability_values(job: Job, step_seconds: float) -> dict[str, Any]:
    """Interruptions, checkpoint size, Young's interval in seconds and steps."""
    cluster = job.cluster
    days = job.tokens / job.global_batch_tokens * step_seconds / DAY_SECONDS
    between = reliability.mean_seconds_between_failures(cluster.failures_per_device_day, cluster.devices)
    interval = reliability.young_interval_seconds(cluster.checkpoint_seconds, between)
    return {
        "failures_per_device_day": cluster.failures_per_device_day,
        "expected_interruptions": reliability.expected_interruptions(
            cluster.failures_per_device_day, cluster.devices, days
        ),
        "mean_seconds_between_failures": between,
        "checkpoint_bytes": reliability.checkpoint_bytes(job.model),
        "checkpoint_bytes_with_bf16_copy": reliability.checkpoint_bytes(job.model, 14),
        "checkpoint_seconds": cluster.checkpoint_seconds,
        "young_interval_seconds": interval,
        "young_interval_steps": max(1, round(interval / step_seconds)),
        "lost_share": reliability.young_lost_share(cluster.checkpoint_seconds, between),
    }


def data_values(job: Job) -> dict[str, Any]:
    """Bytes of the shards' ids, and epochs of each source: weight x tokens / unique tokens."""
    value_bytes = 4 if job.model.vocab_size > 1 << 16 else 2
    whole = sum(weight for weight, _ in job.sources.values())
    rows: list[dict[str, Any]] = [
        {"source": name, "weight": weight / whole, "unique_tokens": unique, "drawn_tokens": weight / whole * job.tokens,
         "epochs": weight / whole * job.tokens / unique}
        for name, (weight, unique) in job.sources.items()
    ]  # fmt: skip
    return {
        "id_bytes": value_bytes,
        "shards_bytes": value_bytes * job.tokens,
        "sources": rows,
        "repeated": [row["source"] for row in rows if row["epochs"] > MAX_EPOCHS],
    }


def loss_values(job: Job) -> dict[str, Any] | None:
    """Predicted loss, the compute-optimal size at the same 6 N D, and the cheapest size to train and serve at it."""
    if job.surface is None:
        return None
    surface, n_params = job.surface, count_parameters(job.model).total
    loss, six_nd = surface.loss(n_params, job.tokens), 6 * n_params * job.tokens
    best_n, best_d = surface.optimum(six_nd)
    aware_n, aware_d = surface.inference_aware(loss, job.inference_tokens)
    return {
        "surface": dataclasses.asdict(surface),
        "predicted": loss,
        "flops_6nd": six_nd,
        "optimal": {"n_params": best_n, "tokens": best_d, "loss": surface.loss(best_n, best_d)},
        "inference_tokens": job.inference_tokens,
        "inference_aware": {"n_params": aware_n, "tokens": aware_d, "loss": surface.loss(aware_n, aware_d)},
    }
