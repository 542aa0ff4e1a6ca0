"""Bytes that a rank sends: ring collectives, the textbook's figures by kind of parallelism, and this recipe's own.

A ring of n ranks over S bytes: all-reduce sends 2 (n-1)/n S a rank; all-gather, reduce-scatter and all-to-all
(n-1)/n S, S being the whole tensor (Patarasu and Yuan 2009, J. Parallel Distrib. Comput. 69(2), 117).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from lm.config import ModelConfig
from lm.plan import ZERO3_PERSISTENCE_ELEMENTS, parameter_shapes
from lm.planner.activations import Numerics
from lm.planner.layout import Layout

RING_FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def ring_bytes(kind: str, n_bytes: float, ranks: int) -> float:
    """Bytes a rank sends for a collective of `kind` over a tensor of `n_bytes`."""
    return RING_FACTORS[kind] * (ranks - 1) / ranks * n_bytes


# The textbook's figures, in bytes a rank ---------------------------------------------------------------------------


def data_parallel_bytes(n_params: float, ranks: int, value_bytes: int = 2) -> float:
    """One all-reduce of the gradients a step; also ZeRO-1 and 2 (arXiv 1910.02054, sec. 7.2.1)."""
    return ring_bytes("all_reduce", value_bytes * n_params, ranks)


def full_shard_bytes(n_params: float, ranks: int, value_bytes: int = 2) -> float:
    """Two gathers of the weights and a reduce-scatter of the gradients: ZeRO-3 and FSDP (sec. 7.2.2)."""
    return 3 * ring_bytes("all_gather", value_bytes * n_params, ranks)


def hybrid_shard_bytes(n_params: float, replicate: int, shard: int, value_bytes: int = 2) -> tuple[float, float]:
    """(inside a shard group, between the copies of a shard) of HSDP."""
    inside = full_shard_bytes(n_params, shard, value_bytes)
    return inside, ring_bytes("all_reduce", value_bytes * n_params / shard, replicate)


def tensor_parallel_bytes(config: ModelConfig, tokens: int, ranks: int, value_bytes: int = 2) -> float:
    """A micro-batch: four all-reduces of [tokens, d] a layer, forward and backward (arXiv 1909.08053, sec. 3)."""
    return config.n_layers * 4 * ring_bytes("all_reduce", value_bytes * tokens * config.d_model, ranks)


def pipeline_bytes(config: ModelConfig, tokens: int, value_bytes: int = 2) -> float:
    """A micro-batch over one boundary of stages, one direction: [tokens, d]."""
    return value_bytes * tokens * config.d_model


def ring_attention_bytes(
    config: ModelConfig, sequence_length: int, ranks: int, value_bytes: int = 2
) -> tuple[float, float]:
    """(a hop, a layer forward): keys and values of a window's part go round (arXiv 2310.01889, sec. 3)."""
    hop = 2 * value_bytes * (sequence_length // ranks) * config.n_kv_heads * config.d_head
    return hop, (ranks - 1) * hop


def expert_parallel_bytes(config: ModelConfig, tokens: int, ranks: int, top_k: int = 2, value_bytes: int = 2) -> float:
    """A mixture-of-experts layer, forward and backward: tokens go to their experts and back, twice
    (arXiv 2006.16668, sec. 3.2). The recipe has no such layer."""
    return 4 * ring_bytes("all_to_all", value_bytes * top_k * tokens * config.d_model, ranks)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of a step that a stage waits, (p-1)/(m+p-1) (arXiv 1811.06965, sec. 2.3)."""
    return (stages - 1) / (micro_batches + stages - 1)


# This recipe's collectives -----------------------------------------------------------------------------------------


# Gradients averaged at once: bucket_cap_mb of DDP, reduce_bucket_size of ZeRO (plugins/strategies).
BUCKET_BYTES = {"ddp": 25_000_000, "zero": 4 * 200_000_000}


@dataclass(frozen=True)
class Transfer:
    """What a rank sends in an optimizer step for one purpose.

    Attributes:
        what: a few words.
        kind: of collective.
        ranks: of its group.
        span: neighbouring devices that the group reaches over.
        sent_bytes: by this rank, as a ring.
        calls: of the collective.
        hidden_behind: compute (of every micro-batch), backward (of the last micro-batch), or nothing.
    """

    what: str
    kind: str
    ranks: int
    span: int
    sent_bytes: float
    calls: int
    hidden_behind: str


def transfers(
    config: ModelConfig, layout: Layout, tokens: int, numerics: Numerics = Numerics(), *, reuse: int = 1_000_000_000
) -> list[Transfer]:
    """Collectives of one optimizer step that move more than a few numbers, as the strategies here issue them.

    fsdp, hsdp gather each block twice and embedding, norm and head once a micro-batch, in bf16 where products are, and
    average gradients in fp32. ddp averages fp32 gradients once. zero1 all-reduces fp32 gradients (not reduce-scatter:
    DeepSpeed sums its buckets on all ranks) and gathers fp32 weights; zero2 the same, with a reduction for each
    micro-batch. zero3 gathers and scatters fp32.

    Args:
        tokens: of a micro-batch on a device, its part of the windows under context parallelism.
        reuse: elements within which ZeRO-3 keeps gathered weights for their next use (DeepSpeed's default).
    """
    data = _sharded(config, layout, numerics) if layout.sharded_module else _replicated(config, layout, reuse)
    found = [*data, *_tensor(config, layout, tokens, numerics), *_context(config, layout, tokens, numerics)]
    return [transfer for transfer in found if transfer.ranks > 1]


def local_shape(name: str, shape: tuple[int, ...], tensor: int) -> tuple[int, ...]:
    """What one device of a tensor group holds of a parameter; the largest part where rows do not divide."""
    if tensor == 1 or len(shape) == 1:
        return shape
    if name.endswith(("wo.weight", "w_down.weight")):
        return shape[0], shape[1] // tensor
    return -(-shape[0] // tensor), shape[1]


@lru_cache(maxsize=1024)
def padded_elements(config: ModelConfig, shard: int, tensor: int = 1) -> tuple[int, int]:
    """(all blocks, the rest): elements of a tensor group's part, rows padded to whole ones a shard."""
    sums = [0, 0]
    for name, whole in parameter_shapes(config).items():
        rows, *rest = local_shape(name, whole, tensor)
        sums[0 if name.startswith("blocks.") else 1] += shard * -(-rows // shard) * prod(rest)
    return sums[0], sums[1]


@lru_cache(maxsize=64)
def _elements(config: ModelConfig) -> tuple[int, int]:
    """(all parameters, those that ZeRO-3 keeps whole)."""
    sizes = [prod(shape) for shape in parameter_shapes(config).values()]
    return sum(sizes), sum(size for size in sizes if size < ZERO3_PERSISTENCE_ELEMENTS)


def _sharded(config: ModelConfig, layout: Layout, numerics: Numerics) -> list[Transfer]:
    shard, tensor, copies = layout.shard, layout.tensor, layout.replicate
    blocks, root = padded_elements(config, shard, tensor)
    gathered = layout.accumulation * numerics.residual_bytes * (2 * blocks + root)
    reduced = layout.reductions * 4 * (blocks + root)
    behind = "compute" if layout.reductions == layout.accumulation else "backward"
    span, layers = shard * tensor, config.n_layers
    calls = layout.reductions * (layers + 1)
    sent = ring_bytes("all_gather", gathered, shard)
    scattered = ring_bytes("reduce_scatter", reduced, shard)
    averaged = ring_bytes("all_reduce", reduced / shard, copies)
    return [
        Transfer("gather weights", "all_gather", shard, span, sent, layout.accumulation * (2 * layers + 1), "compute"),
        Transfer("average gradients", "reduce_scatter", shard, span, scattered, calls, behind),
        Transfer("average over copies", "all_reduce", copies, layout.world, averaged, calls, behind),
    ]


def _replicated(config: ModelConfig, layout: Layout, reuse: int) -> list[Transfer]:
    n, (elements, persistent) = layout.world, _elements(config)
    total = 4 * elements
    behind = "compute" if layout.reductions == layout.accumulation else "backward"
    if layout.strategy == "zero3":
        uses = 2 if elements > reuse else 1
        gathered = layout.accumulation * uses * (total - 4 * persistent) + 4 * persistent
        reduced = layout.reductions * total
        sent, scattered = ring_bytes("all_gather", gathered, n), ring_bytes("reduce_scatter", reduced, n)
        fetches = layout.accumulation * uses * 7 * config.n_layers  # the matrices of a block, one by one
        buckets = layout.reductions * -(-total // BUCKET_BYTES["zero"])
        return [
            Transfer("gather weights", "all_gather", n, n, sent, fetches, "compute"),
            Transfer("average gradients", "reduce_scatter", n, n, scattered, buckets, behind),
        ]
    summed = ring_bytes("all_reduce", layout.reductions * total, n)
    zero = layout.strategy in ("zero1", "zero2")
    buckets = layout.reductions * -(-total // BUCKET_BYTES["zero" if zero else "ddp"])
    found = [Transfer("average gradients", "all_reduce", n, n, summed, buckets, behind)]
    if zero:
        found.append(Transfer("gather weights", "all_gather", n, n, ring_bytes("all_gather", total, n), 2, "nothing"))
    return found


def _tensor(config: ModelConfig, layout: Layout, tokens: int, numerics: Numerics) -> list[Transfer]:
    """Two sums a layer each way, one of embeddings, one of the loss's gradient (fp32), three numbers a token."""
    n, c, residual = layout.tensor, numerics.product_bytes, numerics.residual_bytes
    per_token = config.d_model * (4 * config.n_layers * c + residual + 4) + 3 * 4
    sent = layout.accumulation * ring_bytes("all_reduce", tokens * per_token, n)
    calls = layout.accumulation * (4 * config.n_layers + 5)
    return [Transfer("sum over tensor group", "all_reduce", n, n, sent, calls, "nothing")]


def _context(config: ModelConfig, layout: Layout, tokens: int, numerics: Numerics) -> list[Transfer]:
    """Heads for positions around attention and back, forward and backward (arXiv 2309.14509, sec. 3.2)."""
    n = layout.context
    heads, kv_heads = config.n_heads // layout.tensor, config.n_kv_heads // layout.tensor
    kv_heads *= max(1, n // kv_heads)
    per_token = 2 * config.n_layers * numerics.product_bytes * config.d_head * (2 * heads + 2 * kv_heads)
    sent = layout.accumulation * ring_bytes("all_to_all", tokens * per_token, n)
    losses = layout.accumulation * ring_bytes("all_gather", n * tokens * 2 * 4, n)
    span, m = n * layout.tensor, layout.accumulation
    return [
        Transfer("heads for positions", "all_to_all", n, span, sent, m * 4 * config.n_layers, "nothing"),
        Transfer("losses of a window", "all_gather", n, span, losses, m * 2, "nothing"),
    ]
