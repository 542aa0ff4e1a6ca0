"""Every way to spread a job over its devices, by the textbook's bytes: what a rank sends against what it computes."""

from __future__ import annotations

from dataclasses import dataclass

from lm.plan import count_parameters, flops_per_token
from lm.planner import communication as comm
from lm.planner.job import Job


@dataclass(frozen=True)
class Way:
    """One kind of parallelism, for a micro-batch on a rank.

    Attributes:
        name: of the kind.
        ranks: of a group.
        link: node or network.
        sent_bytes: by a rank, values of 16 bit (32 under 32-true); gradients are averaged once an optimizer step.
        seconds: over that link, latency left out.
        compute_seconds: of the same micro-batch on one rank of the group.
    """

    name: str
    ranks: int
    link: str
    sent_bytes: float
    seconds: float
    compute_seconds: float


def ways(job: Job, micro_batch: int) -> list[Way]:
    """The kinds that this cluster can have; see lm.planner.communication for each formula.

    Tensor, context and expert groups are a node, pipelines as many stages as a node has devices.

    Args:
        micro_batch: windows that a rank takes at once.
    """
    world, node, config = job.cluster.devices, job.cluster.devices_per_node, job.model
    tokens, value = micro_batch * job.sequence_length, 2 if job.mixed else 4
    n_params = count_parameters(config).total
    whole = _compute_seconds(job, tokens)
    stages = min(node, config.n_layers)
    inside, between = comm.hybrid_shard_bytes(n_params, world // node, node, value)
    ring = config.n_layers * comm.ring_attention_bytes(config, job.sequence_length, node, value)[1] * micro_batch
    rows = [  # name, ranks, span, bytes, ranks that share the computing
        ("data parallel, ZeRO-1 and 2", world, world, comm.data_parallel_bytes(n_params, world, value), 1),
        ("ZeRO-3, FSDP", world, world, comm.full_shard_bytes(n_params, world, value), 1),
        ("HSDP, inside a node", node, node, inside, 1),
        ("HSDP, between nodes", world // node, world, between, 1),
        ("tensor", node, node, comm.tensor_parallel_bytes(config, tokens, node, value), node),
        ("pipeline, a boundary, each direction", stages, world, comm.pipeline_bytes(config, tokens, value), stages),
        ("context as a ring, forward", node, node, ring, node),
        ("experts, a layer, top 2", node, node, comm.expert_parallel_bytes(config, tokens, node, 2, value), 1),
    ]
    return [
        Way(
            name,
            ranks,
            "node" if span <= node else "network",
            sent,
            sent / job.cluster.bytes_per_s(span),
            whole / share,
        )
        for name, ranks, span, sent, share in rows
        if ranks > 1 and sent > 0
    ]


def _compute_seconds(job: Job, tokens: int) -> float:
    rate = job.cluster.mfu * job.cluster.peak_flops("bf16" if job.mixed else "fp32")
    return tokens * flops_per_token(job.model, job.sequence_length, job.flops_convention) / rate


def pipeline(job: Job, micro_batch: int) -> dict[str, float]:
    """Stages, micro-batches of each pipeline, and the share of a step that a stage waits."""
    stages = min(job.cluster.devices_per_node, job.model.n_layers)
    micro_batches = max(1, job.sequences * stages // (job.cluster.devices * micro_batch))
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "bubble": comm.pipeline_bubble(stages, micro_batches),
    }
