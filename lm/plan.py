"""Arithmetic about a Llama model before it exists: parameters by part, FLOPs under named conventions, tokens.

Standard library only, so that sweeps, reports and the command line can plan without torch.

Letters: L n_layers, d d_model, h n_heads, k n_kv_heads, d_h d_head, f d_ff, V vocab_size, T sequence_length.

FLOP conventions differ by up to 2x for small models and move a fitted exponent from .50 to .84 (Porian et al. 2024,
arXiv 2406.19146), so every function takes the convention's name and nothing is assumed silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from lm.config import ModelConfig

_T = TypeVar("_T")


@dataclass(frozen=True)
class ParameterCount:
    """Trainable parameters of a Llama model, by part.

    Attributes:
        embedding: V d, the input table.
        attention: query, key, value and output matrices of all layers.
        mlp: gate, up and down matrices of all layers.
        norms: RMSNorm gains: two a layer, the last one, and those of queries and keys under qk_norm.
        head: V d of an untied head; 0 when the head shares the embedding's matrix.
        head_matmul: V d, the matrix the head multiplies by, stored twice or not.
    """

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int
    head_matmul: int

    @property
    def total(self) -> int:
        """Stored parameters; a shared matrix counts once."""
        return self.embedding + self.attention + self.mlp + self.norms + self.head

    @property
    def non_embedding(self) -> int:
        """Parameters of the blocks alone, matrices only: Kaplan's N (arXiv 2001.08361, table 1)."""
        return self.attention + self.mlp

    @property
    def matmul(self) -> int:
        """Parameters that multiply a token: blocks and head, tied or not; no input table, no norms."""
        return self.attention + self.mlp + self.head_matmul


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Exact parameter count by part.

    Total untied: L (2 d h d_h + 2 d k d_h + 3 d f + 2 d) + 2 V d + d; Llama-2-7B gives 6,738,415,616.
    """
    d, layers = config.d_model, config.n_layers
    d_query = config.n_heads * config.d_head
    d_key = config.n_kv_heads * config.d_head
    table = config.vocab_size * d
    return ParameterCount(
        embedding=table,
        attention=layers * (2 * d * d_query + 2 * d * d_key),
        mlp=layers * 3 * d * config.d_ff,
        norms=layers * (2 * d + (2 * config.d_head if config.qk_norm else 0)) + d,
        head=0 if config.tie_embeddings else table,
        head_matmul=table,
    )


# What `N` may mean. A fit and its forecast must use the same one.
PARAMETER_CONVENTIONS: dict[str, Callable[[ParameterCount], int]] = {
    "total": lambda count: count.total,
    "matmul": lambda count: count.matmul,
    "non_embedding": lambda count: count.non_embedding,
}


def n_params(config: ModelConfig, convention: str = "matmul") -> int:
    """N under a named convention.

    Args:
        convention: `total` (everything stored), `matmul` (blocks and head), `non_embedding` (blocks only, Kaplan).

    Raises:
        ValueError: unknown convention.
    """
    return _named(PARAMETER_CONVENTIONS, convention, "parameter")(count_parameters(config))


def _attention_flops_per_token(config: ModelConfig, sequence_length: int, factor: int) -> int:
    """factor L T d_attn, d_attn = n_heads d_head. 12 counts the full score matrix, 6 the causal half of it."""
    return factor * config.n_layers * sequence_length * config.n_heads * config.d_head


def _flops_6n(config: ModelConfig, sequence_length: int) -> int:
    return 6 * count_parameters(config).total


def _flops_matmul_causal(config: ModelConfig, sequence_length: int) -> int:
    return 6 * count_parameters(config).matmul + _attention_flops_per_token(config, sequence_length, 6)


def _flops_palm(config: ModelConfig, sequence_length: int) -> int:
    return 6 * count_parameters(config).total + _attention_flops_per_token(config, sequence_length, 12)


def _flops_kaplan(config: ModelConfig, sequence_length: int) -> int:
    return 6 * count_parameters(config).non_embedding


FLOP_CONVENTIONS: dict[str, Callable[[ModelConfig, int], int]] = {
    "6N": _flops_6n,
    "matmul+causal_attention": _flops_matmul_causal,
    "palm": _flops_palm,
    "kaplan": _flops_kaplan,
}
DEFAULT_FLOP_CONVENTION = "matmul+causal_attention"


def flops_per_token(config: ModelConfig, sequence_length: int, convention: str = DEFAULT_FLOP_CONVENTION) -> int:
    """FLOPs of one token's forward and backward pass, a multiply-add counted as two.

    Args:
        sequence_length: T in tokens; `6N` and `kaplan` do not use it.
        convention:
            `6N`: 6 N_total.
            `matmul+causal_attention`: 6 N_matmul + 6 L T d_attn; no input embedding, causal attention halved.
            `palm`: 6 N_total + 12 L T d_attn (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
            `kaplan`: 6 N_non_embedding (Kaplan et al. 2020, arXiv 2001.08361, section 2.1, context term left out).

    Raises:
        ValueError: unknown convention, or a sequence length below 1.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1 token, got {sequence_length}")
    return _named(FLOP_CONVENTIONS, convention, "FLOP")(config, sequence_length)


def training_flops(
    config: ModelConfig, tokens: float, sequence_length: int, convention: str = DEFAULT_FLOP_CONVENTION
) -> float:
    """FLOPs of training on `tokens` tokens."""
    return flops_per_token(config, sequence_length, convention) * float(tokens)


def tokens_for_budget(
    config: ModelConfig, budget_flops: float, sequence_length: int, convention: str = DEFAULT_FLOP_CONVENTION
) -> float:
    """Tokens that spend exactly `budget_flops`; the caller rounds to whole steps.

    Raises:
        ValueError: a budget that is not positive.
    """
    if not budget_flops > 0:
        raise ValueError(f"budget_flops must be positive, got {budget_flops}")
    return budget_flops / flops_per_token(config, sequence_length, convention)


def steps_for_budget(
    config: ModelConfig,
    budget_flops: float,
    sequence_length: int,
    global_batch_tokens: int,
    convention: str = DEFAULT_FLOP_CONVENTION,
) -> int:
    """Whole optimizer steps, at least one, whose FLOPs come nearest to the budget."""
    tokens = tokens_for_budget(config, budget_flops, sequence_length, convention)
    return max(1, round(tokens / global_batch_tokens))


def _named(table: dict[str, _T], name: str, kind: str) -> _T:
    if name not in table:
        raise ValueError(f"unknown {kind} convention {name!r}; choose one of {', '.join(table)}")
    return table[name]


# Memory -------------------------------------------------------------------------------------------------------------

MEMORY_STRATEGIES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
ZERO3_PERSISTENCE_ELEMENTS = 100_000  # DeepSpeed keeps smaller parameters whole on each rank (its default)


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes that the fullest rank holds right before an optimizer step; activations and buffers are not in it.

    Attributes:
        parameters: with every copy that stays, such as DeepSpeed's fp32 copy for the optimizer.
        gradients: averaged ones, as they wait for the optimizer.
        optimizer_state: two moments (AdamW).
    """

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by name, in the model's order; a shared matrix once."""
    d, query, key = config.d_model, config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    block: dict[str, tuple[int, ...]] = {"attention_norm": (d,)}
    block |= {
        "attention.wq": (query, d),
        "attention.wk": (key, d),
        "attention.wv": (key, d),
        "attention.wo": (d, query),
    }
    if config.qk_norm:
        block |= {"attention.q_norm": (config.d_head,), "attention.k_norm": (config.d_head,)}
    block |= {
        "mlp_norm": (d,),
        "mlp.w_gate": (config.d_ff, d),
        "mlp.w_up": (config.d_ff, d),
        "mlp.w_down": (d, config.d_ff),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, d)}
    for layer in range(config.n_layers):
        shapes |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["norm.weight"] = (d,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, d)
    return shapes


def memory_bytes(
    config: ModelConfig, strategy: str, world_size: int, *, shard: int | None = None, bytes_per_value: int = 4
) -> MemoryBytes:
    """Bytes of parameters, gradients and AdamW state on the fullest of `world_size` ranks; P is all parameters.

    Conventions, in values of `bytes_per_value` (fp32 under 32-true and bf16-mixed alike), W being world_size:

        single, ddp   P, P, 2 P
        fsdp, hsdp    each matrix cut by rows into `shard` parts, the first rank's rounded up: S, S, 2 S
        zero1, zero2  P + P/W (the optimizer's fp32 copy of its part), G, 2 P/W; G: the gradients, whole, of all
                      parameters that reach into the rank's part (stage 1 too has freed the others by then)
        zero3         2 P/W + parameters below ZERO3_PERSISTENCE_ELEMENTS, P/W, 2 P/W

    Without gradient accumulation: with it, fsdp keeps whole gradients between micro-batches unless
    reduce_every_micro_batch is set.

    Args:
        shard: devices that share a copy under hsdp; under fsdp all do.

    Raises:
        ValueError: unknown strategy, or sizes that do not fit.
    """
    if world_size < 1 or (shard is not None and (shard < 1 or world_size % shard)):
        raise ValueError(f"world_size {world_size} and shard {shard} must be positive, and shard divide world_size")
    if strategy not in ("single", *MEMORY_STRATEGIES):
        raise ValueError(f"unknown strategy {strategy!r}; choose one of single, {', '.join(MEMORY_STRATEGIES)}")
    shapes = parameter_shapes(config)
    total = sum(prod(shape) for shape in shapes.values())
    part = -(-total // world_size)
    sharded = sum(-(-rows // (shard or world_size)) * prod(rest) for rows, *rest in shapes.values())
    reaching = max(map(sum, zip(*(_reaching(group, world_size) for group in _group_sizes(shapes)), strict=True)))
    persistent = sum(size for shape in shapes.values() if (size := prod(shape)) < ZERO3_PERSISTENCE_ELEMENTS)
    values = {
        "single": (total, total, 2 * total),
        "ddp": (total, total, 2 * total),
        "fsdp": (sharded, sharded, 2 * sharded),
        "hsdp": (sharded, sharded, 2 * sharded),
        "zero1": (total + part, reaching, 2 * part),
        "zero2": (total + part, reaching, 2 * part),
        "zero3": (2 * part + persistent, part, 2 * part),
    }
    return MemoryBytes(*(value * bytes_per_value for value in values[strategy]))


def _group_sizes(shapes: dict[str, tuple[int, ...]]) -> list[list[int]]:
    """Sizes of the parameters in each optimizer group: matrices of the blocks; embedding, norms and head."""
    groups: list[list[int]] = [[], []]
    for name, shape in shapes.items():
        groups[0 if name.startswith("blocks.") and len(shape) == 2 else 1].append(prod(shape))
    return groups


def _reaching(sizes: list[int], world_size: int) -> list[int]:
    """Per rank: summed sizes of the parameters, laid end to end and cut into equal parts, that reach into its part."""
    part = max(1, -(-sum(sizes) // world_size))
    held, start = [0] * world_size, 0
    for size in sizes:
        for rank in range(start // part, (start + size - 1) // part + 1):
            held[rank] += size
        start += size
    return held
