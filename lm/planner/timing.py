"""Seconds of an optimizer step, by what a device does in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.plan import count_parameters, flops_per_token
from lm.planner.activations import Numerics, activation_bytes, block_bytes_per_token
from lm.planner.communication import Transfer, transfers
from lm.planner.job import Job
from lm.planner.layout import Layout
from lm.planner.memory import device_type_of, numerics_of


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        compute: forward and backward, at cluster.mfu of the peak.
        recompute: what activation checkpointing computes again.
        communication: transfers that nothing hides.
        hidden: transfers behind computing; not part of the step.
    """

    compute: float
    recompute: float
    communication: float
    hidden: float

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.communication

    @property
    def parts(self) -> dict[str, float]:
        return dict(vars(self))


def attention_share(config: ModelConfig, sequence_length: int, count: str = "matmul") -> float:
    """Share of 6 L T d in the FLOPs of a token.

    Args:
        count: parameters the other FLOPs are 6 a piece of: `matmul`, or `total`, which counts the embedding too.
    """
    attention = _attention_flops(config, sequence_length)
    return attention / (6 * getattr(count_parameters(config), count) + attention)


def _attention_flops(config: ModelConfig, sequence_length: int) -> int:
    return 6 * config.n_layers * sequence_length * config.n_heads * config.d_head


def micro_batch_seconds(job: Job, layout: Layout) -> tuple[float, float]:
    """(compute, recompute) of one micro-batch on one device.

    FP8 speeds up the blocks' matrices only (plugins.precision.float8): attention and head run in bf16. Selective
    checkpointing reads and writes again what is cheap to compute, at the memory's bandwidth, and does attention again
    where it is FlashAttention or FlexAttention (lm/activations.py keeps only that of scaled_dot_product_attention).
    """
    config, cluster = job.model, job.cluster
    if cluster.spec.rates:
        return measured_seconds(job, layout)
    tokens = layout.micro_batch * job.sequence_length / (layout.context * layout.tensor)
    count = count_parameters(config)
    blocks, attention = 6 * count.non_embedding, _attention_flops(config, job.sequence_length)
    rest = flops_per_token(config, job.sequence_length, job.flops_convention) - blocks
    plain = cluster.peak_flops("bf16" if job.mixed else "fp32") * cluster.mfu
    fast = cluster.peak_flops("fp8") * cluster.mfu if job.precision == "fp8" else plain
    compute = tokens * (blocks / fast + rest / plain)
    if layout.checkpointing == "full":
        return compute, tokens / 3 * (blocks / fast + attention / plain)
    if layout.checkpointing == "selective":
        numerics = numerics_of(layout, job.precision, device_type_of(job))
        dropped = block_bytes_per_token(config, "none", numerics) - block_bytes_per_token(config, "selective", numerics)
        again = 2 * dropped * config.n_layers / (1e9 * cluster.spec.memory_gb_per_s)
        return compute, tokens * (again + (attention / 3 / plain if numerics.fused else 0.0))
    return compute, 0.0


def work(config: ModelConfig, windows: int, sequence_length: int) -> dict[str, float]:
    """What a step of one process does, in the units of Device.rates.

    matmul_flops, attention_flops: forward and backward; activation_bytes: kept, as a measure of what the cheap
    operations read and write; parameters: that the optimizer visits; blocks: entered; steps: one.
    """
    tokens = windows * sequence_length
    count = count_parameters(config)
    return {
        "matmul_flops": 6.0 * count.matmul * tokens,
        "attention_flops": float(_attention_flops(config, sequence_length) * tokens),
        "activation_bytes": float(activation_bytes(config, windows, sequence_length, "none", _CPU)),
        "parameters": float(count.total),
        "blocks": float(config.n_layers),
        "steps": 1.0,
    }


_CPU = Numerics(False, False, "cpu")
_ONCE_A_STEP = ("parameters", "steps")


def measured_seconds(job: Job, layout: Layout) -> tuple[float, float]:
    """(compute, recompute) of a micro-batch on a machine that was measured; the optimizer is spread over them."""
    rates, done = job.cluster.spec.rates, work(job.model, layout.micro_batch, job.sequence_length)
    missing = done.keys() - rates.keys()
    if missing:
        raise ConfigError(
            f"cluster.device {job.cluster.device} has no rate of {', '.join(sorted(missing))}; measure it anew"
        )
    spread = {name: value / layout.accumulation if name in _ONCE_A_STEP else value for name, value in done.items()}
    compute = sum(rates[name] * value for name, value in spread.items())
    again = {"none": 0.0, "selective": rates["activation_bytes"] * done["activation_bytes"] / 3}
    forward = sum(rates[name] * value for name, value in done.items() if name not in _ONCE_A_STEP) / 3
    return compute, again.get(layout.checkpointing, forward)


def seconds_of(job: Job, sent: Sequence[Transfer]) -> list[float]:
    """Of each transfer, over the slowest link that its group spans, with the latency of its calls."""
    latency = 1e-6 * job.cluster.latency_us
    return [
        transfer.sent_bytes / job.cluster.bytes_per_s(transfer.span)
        + transfer.calls * latency * math.ceil(math.log2(transfer.ranks))
        for transfer in sent
    ]


def layout_transfers(job: Job, layout: Layout) -> list[Transfer]:
    """See lm.planner.communication.transfers."""
    tokens = layout.micro_batch * job.sequence_length // layout.context
    numerics = numerics_of(layout, job.precision, device_type_of(job))
    return transfers(job.model, layout, tokens, numerics)


def step_time(job: Job, layout: Layout, sent: Sequence[Transfer], sent_seconds: Sequence[float]) -> StepTime:
    """A transfer is hidden as far as there is computing to hide it behind: of all micro-batches, or two thirds of the
    last one (its backward pass). The optimizer's own time and the loader are taken to be in the MFU.

    Args:
        sent, sent_seconds: from layout_transfers, and from seconds_of.
    """
    compute, recompute = micro_batch_seconds(job, layout)
    m = layout.accumulation
    sums = dict.fromkeys(("compute", "backward", "nothing"), 0.0)
    for transfer, seconds in zip(sent, sent_seconds, strict=True):
        sums[transfer.hidden_behind] += seconds
    cover = m * (compute + recompute)
    last = min(sums["backward"], 2 / 3 * compute + recompute)
    hidden = last + min(sums["compute"], max(0.0, cover - last))
    return StepTime(m * compute, m * recompute, sum(sums.values()) - hidden, hidden)
