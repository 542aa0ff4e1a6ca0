"""Text from a model, token after token, with keys and values of what was seen kept.

Letters: B rows, t new positions, S positions kept, D width, K key-value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.attention import Packing, attention
from lm.errors import ConfigError
from lm.model import GQA, Block, Llama
from lm.rope import rope_table

NO_TOKENS = "a prompt has no tokens: the model predicts what follows something"
_READ_AT_ONCE = 1024  # positions of a prompt: their mask is [1024, S]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the likeliest; else draws from softmax(logits / temperature).
        top_p: draws only from the smallest set of likeliest tokens that holds this much probability (nucleus sampling,
            Holtzman et al. 2019, arXiv 1904.09751).
        seed: row r draws from a generator of its own, so that a row's text does not depend on its neighbours.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be a number from 0 on, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed must be from 0 to {(1 << 32) - 1}, got {self.seed}")


class KeyValueCache:
    """A model that remembers: each call takes new positions only.

    RoPE is that of `length` positions from the beginning on, so that dynamic scaling does not change under way.

    Args:
        model: on one device, whole; not under tensor or context parallelism.
        rows: B.
        length: most positions a row will have; memory is 2 B length K E per block.
    """

    def __init__(self, model: Llama, rows: int, length: int) -> None:
        config, weight = model.config, model.embedding.weight
        theta, scaling = model.rope
        self.model, self.length = model, length
        self._cos, self._sin = rope_table(length, config.d_head, theta, weight.device, scaling)
        shape = (2, config.n_layers, rows, length, config.n_kv_heads, config.d_head)
        self._kept = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._rows = torch.arange(rows, device=weight.device)[:, None]

    def states(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Final normed states of new positions, [B, t, D].

        Args:
            ids: [B, t] int64.
            positions: [B, t] int64; a position given again replaces what was kept of it.
        """
        last = int(positions.max()) + 1
        mask = torch.arange(last, device=ids.device) <= positions[:, None, :, None]  # [B, 1, t, S]
        packing = Packing("sdpa", mask=mask)
        cos, sin = self._cos[positions], self._sin[positions]
        x_BtD = self.model.embedding(ids)
        for layer, block in enumerate(self.model.blocks):
            assert isinstance(block, Block)
            normed = block.attention_norm(x_BtD)
            x_BtD = x_BtD + self._attend(layer, block.attention, normed, positions, cos, sin, packing)
            x_BtD = x_BtD + block.mlp(block.mlp_norm(x_BtD))
        out: Tensor = self.model.norm(x_BtD)
        return out

    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Read prompts; logits [B, V] of what follows each.

        Args:
            ids: [B, T] int64, padded behind.
            lengths: [B] int64, tokens of each prompt.
        """
        B, T = ids.shape
        last = ids.new_zeros(B, self.model.config.d_model, dtype=self._kept.dtype)
        for start in range(0, T, _READ_AT_ONCE):
            part = ids[:, start : start + _READ_AT_ONCE]
            t = part.shape[1]
            x_BtD = self.states(part, torch.arange(start, start + t, device=ids.device).expand(B, -1))
            at = lengths - 1 - start
            ends_here = (at >= 0) & (at < t)
            last[ends_here] = x_BtD[ends_here, at[ends_here]].to(last.dtype)
        return self.model.logits(last)

    def _attend(
        self, layer: int, module: GQA, x_BtD: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, packing: Packing
    ) -> Tensor:
        q, k, v = module.project(x_BtD, cos, sin)
        assert packing.mask is not None
        S = packing.mask.shape[-1]
        for kept, new in zip(self._kept[:, layer], (k, v), strict=True):
            kept[self._rows, positions] = new.to(kept.dtype)
        keys, values = self._kept[:, layer, :, :S].to(q.dtype)
        return module.wo(attention(q, keys, values, packing, module.scale, module.softcap))


@torch.no_grad()
def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int],
    sampling: Sampling = Sampling(),
) -> list[list[int]]:
    """Continue each prompt, at most `max_new_tokens` tokens, up to and with the first id of `stop`.

    Prompts of different lengths share a batch: a shorter one is padded behind, where nothing of it looks, and its new
    tokens take the padding's place.

    Raises:
        ConfigError: a prompt is empty, or max_new_tokens is not positive.
    """
    if not prompts or not all(prompts):
        raise ConfigError(NO_TOKENS)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    device, training = model.embedding.weight.device, model.training
    model.eval()
    try:
        return _generate(model, prompts, max_new_tokens, frozenset(stop), sampling, device)
    finally:
        model.train(training)


def _generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    new: int,
    stop: frozenset[int],
    sampling: Sampling,
    device: torch.device,
) -> list[list[int]]:
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    _check_room(model, len(prompts), longest + new, device)
    cache = KeyValueCache(model, len(prompts), longest + new)
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    logits = cache.read(ids, lengths)
    generators = [torch.Generator().manual_seed(sampling.seed * 1_000_003 + row) for row in range(len(prompts))]
    found: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for count in range(new):
        chosen = choose(logits, sampling, generators)
        for row, token in enumerate(chosen):
            if not done[row]:
                found[row].append(token)
                done[row] = token in stop
        if all(done) or count == new - 1:
            break
        new_states = cache.states(torch.tensor(chosen, device=device)[:, None], (lengths + count)[:, None])
        logits = model.logits(new_states[:, 0])
    return found


def _check_room(model: Llama, rows: int, length: int, device: torch.device) -> None:
    """Raise ConfigError where keys and values would not fit, before the machine runs out of memory over them."""
    config = model.config
    values = 2 * config.n_layers * rows * length * config.n_kv_heads * config.d_head
    needed = values * model.embedding.weight.element_size() + 12 * length * config.d_head  # with tables of RoPE
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # and can be handed out again
        room = torch.cuda.mem_get_info(device)[0] + held
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise ConfigError(
            f"keys and values of {rows} x {length:,} positions take {needed / 1e9:,.0f} GB, {device} has"
            f" {room / 1e9:,.0f}; ask for fewer new tokens or shorter prompts"
        )


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """A token for each row of logits, [B, V]."""
    if not bool(logits.isfinite().all()):
        raise ConfigError("the model's logits are not finite: its weights are damaged, or the run diverged")
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    scaled = logits.double().cpu()
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / sampling.temperature  # at most 0 however small the divisor
    probabilities = scaled.softmax(dim=-1)
    kept = nucleus(probabilities, sampling.top_p)
    return [int(torch.multinomial(p, 1, generator=g)) for p, g in zip(kept, generators, strict=True)]


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Rows of [B, V] with all but the likeliest tokens that together reach top_p set to 0; not normalised again."""
    if top_p >= 1:
        return probabilities
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, index, ordered.masked_fill(before >= top_p, 0.0))
