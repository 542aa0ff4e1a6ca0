"""Bytes kept between forward and backward, tensor by tensor, of this block as lm/model.py computes it.

Letters: n tokens of a micro-batch on a device, d d_model, q n_heads d_head, k n_kv_heads d_head, f d_ff, V vocab_size.

Two things about a block depend on where it runs. On a CPU, RMSNorm is a composite that keeps its normed output too, and
attention keeps keys and values repeated for every query head; on CUDA the norm is one kernel, and FlashAttention or
FlexAttention read grouped heads. The residual stream is fp32 under autocast over fp32 weights (single, ddp, ZeRO) and
bf16 where fully_shard gathers weights in bf16 (fsdp, hsdp).
"""

from __future__ import annotations

from dataclasses import dataclass

from lm.config import ModelConfig
from lm.errors import ConfigError

# lm.loss: logits held at once, in elements.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}


@dataclass(frozen=True)
class Numerics:
    """What decides how many bytes a kept value has.

    Attributes:
        mixed: bf16 products (bf16-mixed, fp8).
        bf16_weights: weights are gathered in bf16 (fsdp, hsdp), so the residual stream is bf16.
        device_type: cpu or cuda.
    """

    mixed: bool = True
    bf16_weights: bool = True
    device_type: str = "cuda"

    @property
    def product_bytes(self) -> int:
        """Of an input or result of a matrix product."""
        return 2 if self.mixed else 4

    @property
    def residual_bytes(self) -> int:
        """Of an element of the residual stream."""
        return 2 if self.mixed and self.bf16_weights else 4

    @property
    def fused(self) -> bool:
        """CUDA's kernels for norms and grouped heads."""
        return self.device_type != "cpu"


def block_bytes_per_token(
    config: ModelConfig, checkpointing: str = "none", numerics: Numerics = Numerics(), tensor: int = 1
) -> int:
    """Bytes a token that one block keeps.

    none: of each norm its fp32 input and root mean square (on a CPU its normed output); the inputs of the seven
    matrices, once where several share one, a copy each under autocast over fp32 weights; q, k, v, attention's result
    and log-sum; gate, up, silu(gate) and the product. full: the block's input. selective: the block's input and the
    results of matrices and, where attention is scaled_dot_product_attention, its own.

    Args:
        tensor: devices that cut matrices; norms and the residual stream stay whole.

    Raises:
        ConfigError: unknown checkpointing.
    """
    d, h, f = config.d_model, config.n_heads // tensor, config.d_ff // tensor
    q, k = h * config.d_head, config.n_kv_heads * config.d_head // tensor
    c, residual = numerics.product_bytes, numerics.residual_bytes
    attention = c * (2 * q + 2 * k) if numerics.fused else 4 * c * q
    if checkpointing == "full":
        return residual * d
    if checkpointing == "selective":
        kept_attention = 0 if numerics.fused else c * q + 4 * h
        return residual * d + c * (q + 2 * k + d + 2 * f + d) + kept_attention
    if checkpointing != "none":
        raise ConfigError(f"activation checkpointing must be none, selective or full, got {checkpointing!r}")
    norm = (4 if numerics.fused else 8) * d + 4
    copies = 5 if numerics.mixed and not numerics.bf16_weights else 2  # autocast casts anew for each matrix
    total = 2 * norm + copies * c * d + attention + 4 * h + 4 * c * f
    if config.qk_norm:
        total += (4 if numerics.fused else 8) * (q + k) + 4 * (h + config.n_kv_heads // tensor)
    return total


def activation_bytes(
    config: ModelConfig,
    windows: int,
    sequence_length: int,
    checkpointing: str = "none",
    numerics: Numerics = Numerics(),
    *,
    tensor: int = 1,
    context: int = 1,
) -> int:
    """Bytes one device keeps when the forward pass of a micro-batch ends: all blocks, final norm, loss.

    The probabilities of the loss are among them where they fit into one chunk (lm/loss.py). Not counted: the compiled
    form of a block, which keeps less; scores of attention_softcap on a CPU, which keep all of [T, T].

    Args:
        windows: of the micro-batch.
        sequence_length: T.
        tensor, context: devices that cut matrices, and windows.
    """
    tokens = windows * sequence_length // context
    blocks = config.n_layers * block_bytes_per_token(config, checkpointing, numerics, tensor)
    d = config.d_model
    final = (4 if numerics.fused else 8) * d + 4 + numerics.residual_bytes * d
    ids = 2 * 8 * context + 2 * 4  # int64 ids and labels come whole, nll and log-sum are of this device's tokens
    kept = tokens * -(-config.vocab_size // tensor)
    probabilities = 4 * kept if tensor == 1 and kept <= CHUNK_ELEMENTS[numerics.device_type] else 0
    return tokens * (blocks + final + ids) + probabilities


def rope_bytes(config: ModelConfig, sequence_length: int) -> int:
    """Two fp32 tables, one for all layers."""
    return 4 * config.d_head * sequence_length


def loss_working_bytes(config: ModelConfig, tokens: int, numerics: Numerics = Numerics(), *, tensor: int = 1) -> int:
    """Most bytes the loss holds at once beside what it is given: logits of a chunk in 16 bit, in fp32 and as
    probabilities, and the head's gradient in fp32, with the head in bf16 where weights are fp32.

    Args:
        tokens: of a micro-batch on a device.
    """
    ids = -(-config.vocab_size // tensor)
    chunk = min(tokens * ids, CHUNK_ELEMENTS[numerics.device_type])
    head = ids * config.d_model
    return chunk * (10 if numerics.mixed else 8) + 4 * head + (2 * head if numerics.residual_bytes < 4 else 0)


def logits_bytes(config: ModelConfig, tokens: int) -> int:
    """All logits in fp32, as a loss without chunks holds them."""
    return 4 * tokens * config.vocab_size


def gpt_layer_bytes(sequence_length: int, batch: int, hidden: int, heads: int, *, scores: bool = True) -> float:
    """s b h (34 + 5 a s / h) of a GPT block in 16 bit (Korthikanti et al. 2022, arXiv 2205.05198, eq. 2).

    Args:
        scores: False leaves out the attention matrix, as FlashAttention does.
    """
    attention = 5 * heads * sequence_length / hidden if scores else 0.0
    return sequence_length * batch * hidden * (34 + attention)
