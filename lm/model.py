"""Llama (Touvron et al. 2023, arXiv 2302.13971): pre-norm blocks of GQA and SwiGLU, RoPE, no biases.

Letters: B batch, T positions, D width, H query heads, K key-value heads, E head size, F MLP width, V vocabulary.
Initial values come from lm.init.materialize; reset_parameters only serves a module used on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lm.activations import run_block
from lm.attention import Packing, attention, pack
from lm.config import ModelConfig, RuntimeConfig
from lm.context_parallel import ContextGroup
from lm.loss import capped, token_nll
from lm.loss_parallel import parallel_token_nll
from lm.rope import apply_rope, rope_table
from lm.rope_scaling import RopeScaling


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4), in fp32, returned in x's dtype."""

    def __init__(self, d_model: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed = F.rms_norm(x_BTD.float(), self.weight.shape, self.weight.float(), self.eps)
        return normed.type_as(x_BTD)


class GQA(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with RoPE."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.d_head = config.d_head
        D, E, H, K = config.d_model, config.d_head, config.n_heads, config.n_kv_heads
        self.wq = nn.Linear(D, H * E, bias=False)
        self.wk = nn.Linear(D, K * E, bias=False)
        self.wv = nn.Linear(D, K * E, bias=False)
        self.wo = nn.Linear(H * E, D, bias=False)
        self.q_norm = RMSNorm(E, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(E, config.norm_eps) if config.qk_norm else None
        self.softcap = config.attention_softcap
        self.watch_scores: list[Callable[[GQA, Tensor, Tensor, Packing], None]] = []  # see q and k; for callbacks
        self.context: ContextGroup | None = None  # set where several processes share a window
        # Under muP scores scale with 1 / E; the constant makes both rules meet at base_d_head.
        self.scale = 1 / math.sqrt(E) if config.mup is None else math.sqrt(config.mup.base_d_head) / E

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, packing: Packing) -> Tensor:
        q_BTHE, k_BTKE, v_BTKE = self.project(x_BTD, cos, sin)
        if self.context is not None:  # until here some positions of all heads, now all positions of some heads
            q_BTHE, k_BTKE, v_BTKE = self.context.to_heads(q_BTHE, k_BTKE, v_BTKE)
        for watch in self.watch_scores:
            watch(self, q_BTHE, k_BTKE, packing)
        out = attention(q_BTHE, k_BTKE, v_BTKE, packing, self.scale, self.softcap)
        if self.context is not None:
            out = self.context.to_positions(out)
        return self.wo(out)

    def project(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, E], keys and values [B, T, K, E], rotated to their positions; cos, sin as in apply_rope."""
        B, T, _ = x_BTD.shape
        q_BTHE, k_BTKE, v_BTKE = (w(x_BTD).view(B, T, -1, self.d_head) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHE, k_BTKE = self.q_norm(q_BTHE), self.k_norm(k_BTKE)
        return apply_rope(q_BTHE, cos, sin), apply_rope(k_BTKE, cos, sin), v_BTKE


class SwiGLU(nn.Module):
    """w_down(silu(w_gate x) * w_up x) (Shazeer 2020, arXiv 2002.05202, eq. 6)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w_gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.w_up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.w_down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x_BTD)) * self.w_up(x_BTD))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = GQA(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, packing: Packing) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin, packing)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nn.Module):
    """A decoder-only transformer over packed windows.

    A tied head has no module of its own: the embedding's matrix is used twice, so that no strategy can pull the two
    apart.
    """

    def __init__(self, config: ModelConfig, runtime: RuntimeConfig = RuntimeConfig()):
        super().__init__()
        self.config = config
        self.runtime = runtime
        self.rope: tuple[float, RopeScaling | None] = config.rope_theta, config.rope_scaling  # stages may change it
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        # Sees what enters block i, and with i = n_layers what leaves the last one; for callbacks.
        self.watch_residual: Callable[[int, Tensor], None] | None = None
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.context: ContextGroup | None = None

    def set_context(self, context: ContextGroup) -> None:
        """Work on this process's positions of each window only; forward still takes and returns whole windows."""
        self.context = context
        for module in self.modules():
            if isinstance(module, GQA):
                module.context = context

    def hidden(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Final normed states, [B, T, D]; [B, T/n, D], of this process's positions, under context parallelism.

        Args:
            input_ids: [B, T] int64.
            document_ids: [B, T] integers that change where a document begins; None for one document a window.
                Positions need not restart: RoPE sees differences only, and attention stays inside a document.
        """
        B, T = input_ids.shape
        theta, scaling = self.rope
        cos, sin = rope_table(T, self.config.d_head, theta, input_ids.device, scaling)
        packing = pack(document_ids, (B, T), input_ids.device, self.runtime.attention)
        if self.context is not None:
            input_ids, cos, sin = self.context.own(input_ids), self.context.own(cos, 0), self.context.own(sin, 0)
        x_BTD = self.embedding(input_ids)
        for index, block in enumerate(self.blocks):
            if self.watch_residual is not None:
                self.watch_residual(index, x_BTD)
            x_BTD = run_block(block, self.runtime.activation_checkpointing, x_BTD, cos, sin, packing)
        if self.watch_residual is not None:
            self.watch_residual(len(self.blocks), x_BTD)
        return self.norm(x_BTD)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Scores of the next token, [B, T, V]; divided by the width multiplier under muP."""
        weight_VD = self._head_weight()
        if isinstance(weight_VD, DTensor):  # tensor parallelism
            weight_VD = weight_VD.full_tensor()
        return capped(F.linear(self._scaled(x_BTD), weight_VD), self.config.final_softcap)

    def _scaled(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.config.mup is None else x_BTD / self.config.width_multiplier

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
        with_logsumexp: bool = False,
        at: Tensor | None = None,
    ) -> Any:
        """Logits [B, T, V], or with labels [B, T] the loss of each position in nats, [B, T] fp32.

        The loss is part of forward because a sharded model gathers the head's weight only for the time of forward.

        Args:
            with_logsumexp: return (loss, logarithm of the softmax's denominator), both [B, T] fp32, for a z-loss.
            at: [B] int64, without labels: logits of one position of each window only, [B, V].
        """
        context = self.context
        if context is not None and labels is None:
            logits = self._logits_of_any_length(context, input_ids, document_ids)
            return logits if at is None else logits[torch.arange(len(at), device=at.device), at]
        x_BTD = self.hidden(input_ids, document_ids)
        if at is not None:
            return self.logits(x_BTD[torch.arange(len(at), device=at.device), at])
        if labels is None:
            return self.logits(x_BTD)
        if context is not None:
            labels = context.own(labels)
        weight_VD = self._head_weight()
        nll: Any = parallel_token_nll if isinstance(weight_VD, DTensor) else token_nll
        losses = nll(self._scaled(x_BTD), weight_VD, labels, softcap=self.config.final_softcap)
        if context is not None:
            losses = tuple(context.whole(x) for x in losses)  # not stacked: fully_shard warns of views as outputs
        return losses if with_logsumexp else losses[0]

    def _logits_of_any_length(self, context: ContextGroup, input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        """Logits [B, T, V] on every process, also where T does not divide: what is put behind is never seen."""
        T = input_ids.shape[1]
        behind = (0, -T % context.size)
        document_ids = None if document_ids is None else F.pad(document_ids, behind, value=-1)
        return context.whole(self.logits(self.hidden(F.pad(input_ids, behind), document_ids)))[:, :T]
