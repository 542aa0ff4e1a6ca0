"""How a run is spread over devices, in the terms of this recipe's strategies."""

from __future__ import annotations

from dataclasses import dataclass

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.planner.job import Job

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp")
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """A strategy with its sizes.

    Attributes:
        strategy: a name of plugins.strategies.
        world: devices.
        shard: devices that share a copy of the state, tensor groups counted as one; 1 for ddp and ZeRO.
        tensor: devices that cut each matrix (fsdp and hsdp only).
        context: devices that cut each window.
        micro_batch: windows a data-parallel rank takes at once.
        accumulation: micro-batches an optimizer step.
        checkpointing: activation checkpointing, see lm.config.RuntimeConfig.
        reduce_every: fsdp and hsdp with accumulation: average gradients after each micro-batch.
    """

    strategy: str
    world: int
    shard: int = 1
    tensor: int = 1
    context: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    reduce_every: bool = False

    @property
    def replicate(self) -> int:
        """Copies of the sharded state that are averaged with each other."""
        return self.world // (self.shard * self.tensor)

    @property
    def data_parallel(self) -> int:
        """Parts that a batch is cut into."""
        return self.world // (self.tensor * self.context)

    @property
    def sharded_module(self) -> bool:
        """True for fully_shard."""
        return self.strategy in ("fsdp", "hsdp")

    @property
    def reductions(self) -> int:
        """Times an optimizer step that gradients are exchanged."""
        each = self.strategy in ("zero2", "zero3") or (self.sharded_module and self.reduce_every)
        return self.accumulation if each else 1

    def describe(self) -> str:
        """One line."""
        name = f"hsdp {self.replicate} x {self.shard}" if self.strategy == "hsdp" else f"{self.strategy} {self.world}"
        parts = [name]
        parts += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        parts += [f"context {self.context}"] if self.context > 1 else []
        parts.append(f"micro-batch {self.micro_batch} x accumulation {self.accumulation}")
        parts += [f"{self.checkpointing} checkpointing"] if self.checkpointing != "none" else []
        parts += ["gradients reduced every micro-batch"] if self.reduce_every else []
        return ", ".join(parts)


def check_layout(job: Job, layout: Layout) -> None:
    """Refuse a layout that this recipe cannot run.

    Raises:
        ConfigError: what does not divide, and by what.
    """
    model, tensor, context = job.model, layout.tensor, layout.context
    if tensor > 1 and not layout.sharded_module:
        raise ConfigError(f"layout.tensor needs fsdp or hsdp, not {layout.strategy}")
    if layout.strategy == "single" and layout.world > 1:
        raise ConfigError(f"layout.strategy single runs on one device, cluster.devices is {layout.world}")
    if layout.world % (layout.shard * tensor) or layout.world % (tensor * context):
        raise ConfigError(
            f"shard {layout.shard}, tensor {tensor} and context {context} do not divide {layout.world} devices"
        )
    _check_cuts(model, job.sequence_length, tensor, context)
    parts = layout.data_parallel * layout.micro_batch * layout.accumulation
    if parts != job.sequences:
        raise ConfigError(
            f"a batch of {job.sequences} windows is not {layout.data_parallel} parts x micro-batch "
            f"{layout.micro_batch} x accumulation {layout.accumulation}"
        )


def _check_cuts(model: ModelConfig, sequence_length: int, tensor: int, context: int) -> None:
    for name in ("n_heads", "n_kv_heads", "d_ff"):
        if getattr(model, name) % tensor:
            raise ConfigError(f"model.{name} {getattr(model, name)} does not divide by tensor {tensor}")
    heads, kv_heads = model.n_heads // tensor, model.n_kv_heads // tensor
    if heads % context or (kv_heads % context and context % kv_heads):
        raise ConfigError(f"{heads} heads, {kv_heads} of keys and values, cannot be dealt out over context {context}")
    if sequence_length % context:
        raise ConfigError(f"sequence_length {sequence_length} does not divide by context {context}")
