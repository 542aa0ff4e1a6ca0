"""Coordinate check: do activations keep their size when the model gets wider? (Yang et al. 2022, arXiv 2203.03466, D.1)

A few steps are trained at each width from the same recipe. Under a parametrisation that transfers hyperparameters, the
mean |x| of every activation after them is about the same at all widths; under the standard one it grows with the width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lm.config import ModelConfig, MuPConfig
from lm.init import materialize
from lm.model import Llama
from lm.optim.build import make_optimizer
from lm.optim.config import MuonConfig, OptimConfig

Scales = dict[str, float]

BASE_WIDTH, D_HEAD = 64, 16
# The head starts at 0: its random logits would shrink with the width under muP and hide those that are learnt.
BASE = ModelConfig(
    vocab_size=128,
    d_model=BASE_WIDTH,
    n_layers=1,
    n_heads=BASE_WIDTH // D_HEAD,
    d_head=D_HEAD,
    d_ff=BASE_WIDTH,
    init_std=0.1,
    embedding_init_std=1.0,
    zero_init_head=True,
)
OPTIMIZERS = {
    "adamw": OptimConfig(lr=8e-3, weight_decay=0.0),
    "muon": OptimConfig(name="muon", lr=8e-3, weight_decay=0.0),
    "muon_original": OptimConfig(name="muon", lr=8e-3, weight_decay=0.0, muon=MuonConfig(lr=2e-2, scaling="original")),
}


def at_width(width: int, mup: bool) -> ModelConfig:
    """BASE made wider: more heads of the same size, a wider MLP; equal to BASE at its own width."""
    return dataclasses.replace(
        BASE,
        d_model=width,
        n_heads=width // D_HEAD,
        n_kv_heads=width // D_HEAD,
        d_ff=width,
        mup=MuPConfig(BASE_WIDTH, D_HEAD) if mup else None,
    )


def activation_scales(
    config: ModelConfig, optim: OptimConfig, steps: int = 10, batch: int = 4, length: int = 32, seed: int = 0
) -> Scales:
    """Mean |x| after `steps` updates on fixed random ids, on the CPU: of what blocks and attentions return, and of
    the logits.

    Returns:
        {"blocks.0": ..., "blocks.0.attention": ..., "logits": ...}.
    """
    with torch.device("meta"):
        model = Llama(config)
    materialize(model, config, seed, "cpu")
    optimizer = make_optimizer(model, config, optim)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (batch, length + 1), generator=generator)
    for _ in range(steps):
        model(tokens[:, :-1], None, tokens[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), _recorded(model) as scales:
        scales["logits"] = model(tokens[:, :-1]).abs().mean().item()
    return scales


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Scales]:
    """Notes mean |x| of what blocks and attentions return."""
    scales: Scales = {}

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(module: nn.Module, inputs: object, output: Tensor) -> None:
            scales[name] = output.abs().mean().item()

        return module.register_forward_hook(note)

    blocks = dict(model.get_submodule("blocks").named_children())
    handles = [watch(f"blocks.{name}", block) for name, block in blocks.items()]
    handles += [watch(f"blocks.{name}.attention", block.get_submodule("attention")) for name, block in blocks.items()]
    try:
        yield scales
    finally:
        for handle in handles:
            handle.remove()


def coordinate_check(widths: Sequence[int], optimizer: str, mup: bool, steps: int = 10) -> dict[int, Scales]:
    """Activation scales of the same recipe at each width.

    Args:
        optimizer: a key of OPTIMIZERS.
        mup: False for the standard parametrisation: the same rates and initial values at every width.
    """
    return {width: activation_scales(at_width(width, mup), OPTIMIZERS[optimizer], steps) for width in widths}


def worst_ratio(scales: dict[int, Scales]) -> tuple[float, str]:
    """(largest over smallest scale of an activation over the widths, which activation), where that is worst."""
    ratios = []
    for name in next(iter(scales.values())):
        values = [scale[name] for scale in scales.values()]
        ratios.append((max(values) / min(values), name))
    return max(ratios)
