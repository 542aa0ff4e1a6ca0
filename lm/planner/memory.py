"""Bytes on one device, by part, at the fullest moment of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lm.config import ModelConfig
from lm.plan import count_parameters, memory_bytes
from lm.planner.activations import Numerics, activation_bytes, block_bytes_per_token, loss_working_bytes, rope_bytes
from lm.planner.communication import padded_elements
from lm.planner.job import Job
from lm.planner.layout import Layout


def adam_state_bytes(n_params: float, devices: int = 1, stage: int = 0) -> float:
    """Mixed-precision Adam on one of `devices`: 2 + 2 + 12 bytes a parameter for bf16 weights and gradients, fp32
    weights and moments; stage 1 cuts the 12, stage 2 the gradients' 2 too, stage 3 all (ZeRO, arXiv 1910.02054,
    sec. 5). The recipe keeps fp32 weights and gradients, also 16 bytes: 4 + 4 + 8.
    """
    weights = 2 / devices if stage >= 3 else 2
    gradients = 2 / devices if stage >= 2 else 2
    optimizer = 12 / devices if stage >= 1 else 12
    return n_params * (weights + gradients + optimizer)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes:
        parameters: fp32 weights that stay.
        gradients: averaged, as they wait for the optimizer; whole ones where micro-batches are accumulated locally.
        optimizer: AdamW's two moments, fp32.
        activations: kept for backward, see lm.planner.activations.
        loss: logits of a chunk and the head's gradient, while the loss is computed.
        weights: gathered, or cast to bf16 for the products; embedding, norm and head of fsdp stay gathered, of the
            blocks there are two.
        buffers: gradients before they are averaged; DeepSpeed's buckets; rotary tables.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    weights: float
    buffers: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.loss + self.weights + self.buffers

    @property
    def state(self) -> float:
        """What a checkpoint would hold, and the gradients."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        return dict(vars(self))


DEEPSPEED_BUCKET_BYTES = 4 * 200_000_000  # reduce_bucket_size of plugins.strategies.deepspeed, fp32


def numerics_of(layout: Layout, precision: str, device_type: str = "cuda") -> Numerics:
    """Under fsdp and hsdp weights are gathered in bf16, under the others autocast casts fp32 ones."""
    return Numerics(precision != "32-true", layout.sharded_module, device_type)


def device_type_of(job: Job) -> str:
    """cpu for a measured machine without a GPU, else cuda."""
    return "cpu" if job.cluster.spec.name.startswith("CPU") else "cuda"


def device_memory(job: Job, layout: Layout) -> DeviceMemory:
    """Bytes on the fullest device as its backward pass begins, when all activations are there."""
    config = job.model
    numerics = numerics_of(layout, job.precision, device_type_of(job))
    tokens = layout.micro_batch * job.sequence_length // layout.context
    parameters, gradients, optimizer = state_bytes(config, layout)
    kept = activation_bytes(
        config, layout.micro_batch, job.sequence_length, layout.checkpointing, numerics,
        tensor=layout.tensor, context=layout.context,
    )  # fmt: skip
    again = 0
    if layout.checkpointing != "none":  # one block is computed anew at a time
        whole = block_bytes_per_token(config, "none", numerics, layout.tensor)
        again = tokens * (whole - block_bytes_per_token(config, layout.checkpointing, numerics, layout.tensor))
    return DeviceMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept + max(again, 0),
        loss=loss_working_bytes(config, tokens, numerics, tensor=layout.tensor),
        weights=weight_copies(config, layout, numerics),
        buffers=buffer_bytes(config, layout, numerics) + rope_bytes(config, job.sequence_length),
    )


def state_bytes(config: ModelConfig, layout: Layout) -> tuple[float, float, float]:
    """(parameters, gradients, optimizer state) of the fullest device; see lm.plan.memory_bytes.

    fsdp and hsdp with accumulation keep whole fp32 gradients between micro-batches unless they are reduced every time.
    """
    if layout.sharded_module:
        blocks, root = padded_elements(config, layout.shard, layout.tensor)
        own = 4 * (blocks + root) / layout.shard
        local = layout.accumulation > 1 and not layout.reduce_every
        return own, own + (4 * (blocks + root) if local else 0), 2 * own
    return _whole_state(config, layout.strategy, layout.world)


@lru_cache(maxsize=256)
def _whole_state(config: ModelConfig, strategy: str, world: int) -> tuple[int, int, int]:
    held = memory_bytes(config, strategy, world)
    return held.parameters, held.gradients, held.optimizer_state


def weight_copies(config: ModelConfig, layout: Layout, numerics: Numerics) -> float:
    """Weights beside the state: gathered (fsdp, hsdp, zero3), or bf16 copies that autocast keeps for backward."""
    if layout.sharded_module:
        blocks, root = padded_elements(config, layout.shard, layout.tensor)
        return numerics.residual_bytes * (root + 2 * blocks / config.n_layers)
    count = count_parameters(config)
    copies = 0.0
    if numerics.mixed:
        # Autocast's cache holds them until forward ends, whatever is checkpointed; ZeRO runs without that cache.
        whole = layout.checkpointing == "none" or not layout.strategy.startswith("zero")
        kept = count.non_embedding if whole else count.non_embedding / config.n_layers
        copies = 2.0 * kept
    if layout.strategy == "zero3":
        copies += 4.0 * (2 * (count.attention + count.mlp) / config.n_layers + count.head_matmul)
    return copies


def gathered_bytes(config: ModelConfig, value_bytes: int = 2) -> float:
    """Two blocks and one of embedding and head: a fully sharded model that gathers each of them apart."""
    count = count_parameters(config)
    return value_bytes * (count.head_matmul + 2 * count.non_embedding / config.n_layers)


def buffer_bytes(config: ModelConfig, layout: Layout, numerics: Numerics) -> float:
    """Gradients on their way: of embedding, norm and head until backward ends, of a block with its fp32 copy."""
    if layout.sharded_module:
        blocks, root = padded_elements(config, layout.shard, layout.tensor)
        value = numerics.residual_bytes
        return value * (root / 2 if not config.tie_embeddings else root) + (value + 4) * blocks / config.n_layers
    if layout.strategy.startswith("zero"):
        return float(min(DEEPSPEED_BUCKET_BYTES, 4 * count_parameters(config).total))
    return 0.0
