"""What the processes of the context-parallel tests do; each function runs on every rank and returns plain values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from lm.attention import attention, pack
from lm.config import ModelConfig, RuntimeConfig
from lm.context_parallel import ContextGroup
from lm.data.synthetic import random_documents, write_folder
from lm.datamodule import TokenDataModule
from lm.errors import ConfigError
from lm.init import materialize
from lm.loss import IGNORE
from lm.model import Llama
from lm.module import LlamaModule
from lm.optim.config import OptimConfig
from plugins.callbacks.qk_clip import QKClip
from plugins.callbacks.throughput import Throughput
from tests.distributed.scenario import Layout, SaveAt, build_trainer

STEPS, SAVED_STEP, T, WINDOWS = 20, 10, 32, 4
MAX_SCORE = 1.0
CONFIG = ModelConfig(vocab_size=300, d_model=25, n_layers=2, n_heads=4, n_kv_heads=2, d_head=4, d_ff=38, init_std=0.15)
ONE_KV_HEAD = dataclasses.replace(CONFIG, n_kv_heads=1)
STABILISED = dataclasses.replace(ONE_KV_HEAD, qk_norm=True, attention_softcap=5.0, final_softcap=8.0)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)


def write_data(folder: Path, n_tokens: int = 4000, mean_length: int = 12) -> Path:
    """Two sources of documents of about `mean_length` tokens: a window holds several."""
    seeds = {"one": {"train": 0, "validation": 1}, "two": {"train": 2, "validation": 3}}
    sources = {
        name: {split: random_documents(n_tokens, 300, mean_length, seed) for split, seed in by_split.items()}
        for name, by_split in seeds.items()
    }
    write_folder(folder, sources, 300)
    return folder


class Recorded(LlamaModule):
    """Keeps what it reports, but for speeds."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, optim=OptimConfig(lr=1e-2, eps=1e-6), **options)
        self.rows: list[dict[str, float]] = []

    def record(self, values):
        super().record(values)
        self.rows.append({key: value for key, value in values.items() if key != "tokens_per_s"})


class Shapes(Callback):
    """[B, T] in training, of what goes into a block, its queries, its MLP's hidden states; and of what comes out."""

    def on_fit_start(self, trainer, module):
        self.seen: dict[str, tuple[int, ...]] = {}
        block = module.model.blocks[0]
        for name, part in {
            "block": block,
            "wq": block.attention.wq,
            "mlp": block.mlp.w_up,
            "wo": block.attention.wo,
        }.items():
            part.register_forward_hook(lambda _, inputs, output, name=name: self.note(name, inputs[0], output))

    def note(self, name: str, before: Tensor, after: Tensor) -> None:
        if torch.is_grad_enabled():
            self.seen[name] = (*before.shape[:2], *after.shape[:2])


def recipe_run(
    layout: Layout,
    data: Path,
    config: ModelConfig = CONFIG,
    *,
    steps: int = STEPS,
    runtime: RuntimeConfig = RuntimeConfig(),
    save: Path | None = None,
    resume: Path | None = None,
    length: int = T,
    windows: int = WINDOWS,
    callbacks: tuple[Callback, ...] = (),
    packing: str = "cut",
    weights: dict[str, float] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """The recipe's own module, data, z-loss and throughput, with clipping, accumulation and a validation at the end.

    QK-clip too, which has to find each head's largest score wherever it was computed; not with QK-norm or where windows
    are long.
    """
    options = {"log_every_n_steps": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0, **options}
    clip = () if config.qk_norm or length > T else (QKClip(MAX_SCORE),)
    saving = () if save is None else (SaveAt(SAVED_STEP, save),)
    trainer = build_trainer(
        layout, steps, accumulate=1, callbacks=[Throughput(), *clip, *saving, *callbacks], **options
    )
    stream = TokenDataModule(
        str(data),
        length,
        length * windows,
        micro_batch_size=min(2, windows),
        validation_windows=5,
        validation_batch_size=2,
        packing=packing,
        weights=weights,
    )
    module = Recorded(config, z_loss=1e-3, runtime=runtime)
    trainer.fit(module, datamodule=stream, ckpt_path=resume)
    return module.rows


def long_window(layout: Layout, data: Path) -> list[dict[str, float]]:
    return recipe_run(layout, data, steps=2, length=8192, windows=1, limit_val_batches=0)


def whole_run(layout: Layout, folder: Path) -> dict[str, Any]:
    """The run, saved at SAVED_STEP."""
    return {"whole": recipe_run(layout, folder / "data", save=folder / layout.name)}


def whole_runs(layout: Layout, folder: Path) -> dict[str, Any]:
    """Short runs of other models beside it."""
    data = folder / "data"
    return {
        **whole_run(layout, folder),
        "stabilised": recipe_run(layout, data, STABILISED, steps=4, runtime=RuntimeConfig("sdpa", False, "full")),
        "tied": recipe_run(layout, data, TIED, steps=4, runtime=RuntimeConfig("documents", False, "selective")),
        "bf16": recipe_run(layout, data, steps=4, precision="bf16-mixed"),
        "packed": recipe_run(layout, data, steps=4, packing="best_fit", weights={f"one[{T // 2 + 1}:{T + 9}]": 1.0}),
    }


def spread_runs(
    layout: Layout, folder: Path, source: str, from_start: Callable[[Layout, Path], dict[str, Any]] | None
) -> dict[str, Any]:
    """Runs from the start, one from the checkpoint of another layout, and the shapes of activations in it."""
    shapes = Shapes()
    resumed = recipe_run(layout, folder / "data", resume=folder / source, callbacks=(shapes,))
    return {
        **(from_start(layout, folder) if from_start is not None else {}),
        "resumed": resumed,
        "shapes": shapes.seen,
    }


def resumed_run(layout: Layout, folder: Path, source: str) -> list[dict[str, float]]:
    return recipe_run(layout, folder / "data", resume=folder / source)


def refusal(layout: Layout, data: Path, length: int) -> str:
    try:
        recipe_run(layout, data, length=length)
    except ConfigError as error:
        return str(error)
    return "no error"


def assert_same(rows: list[dict[str, float]], wanted: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    """Rows of two runs, key by key, relative."""
    assert [row.keys() for row in rows] == [row.keys() for row in wanted]
    for row, wanted_row in zip(rows, wanted, strict=True):
        # The largest of thousands of scores carries the rounding of one query and one key.
        factor = 10 if "max_attention_score" in row else 1
        assert row == pytest.approx(wanted_row, rel=factor * tolerance)


# Without a Trainer --------------------------------------------------------------------------------------------------


def start(device: str = "cpu") -> ContextGroup:
    """All processes as one group, over gloo or NCCL."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    return ContextGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def attention_differences() -> dict[str, float]:
    """Largest difference to plain attention in fp64: outputs and gradients of this rank's positions."""
    context = start()
    differences = {}
    for H, K in ((4, 4), (4, 2), (8, 1)):
        for packed in (False, True):
            for softcap in (None, 2.0):
                differences[f"{H} {K} {packed} {softcap}"] = attention_difference(context, H, K, packed, softcap)
    return differences


def attention_difference(context: ContextGroup, H: int, K: int, packed: bool, softcap: float | None) -> float:
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(3, 12, heads, 6, dtype=torch.float64, generator=generator).requires_grad_() for heads in (H, K, K)
    ]
    weight = torch.randn(3, 12, H * 6, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, 4, (3, 12), generator=generator).sort(dim=1).values if packed else None
    packing = pack(ids, (3, 12), torch.device("cpu"))
    wanted = attention(*whole, packing, 0.5, softcap)
    wanted_gradients = torch.autograd.grad((wanted * weight).sum(), whole)
    own = [context.own(x.detach()).clone().requires_grad_() for x in whole]
    q, k, v = context.to_heads(*own)
    assert q.shape == (3, 12, H // context.size, 6)
    assert k.shape == v.shape == (3, 12, max(1, K // context.size), 6)
    got = context.to_positions(attention(q, k, v, packing, 0.5, softcap))
    gradients = torch.autograd.grad((got * context.own(weight)).sum(), own)
    pairs = [(got, wanted), *zip(gradients, wanted_gradients, strict=True)]
    return max(float((a - context.own(b)).abs().max()) for a, b in pairs)


def exchanged_bits(device: str = "cpu") -> list[bool]:
    """In each dtype the exchange moves values and does nothing to them, on the way there and back."""
    context = start(device)
    generator = torch.Generator().manual_seed(2)
    same = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        whole = [torch.randn(2, 8, heads, 4, generator=generator).to(device, dtype) for heads in (4, 2, 2)]
        q, k, v = context.to_heads(*(context.own(x) for x in whole))
        heads = [x.chunk(context.size, dim=2)[context.rank] for x in whole]
        back = context.to_positions(q.flatten(2))
        same.append(all(map(torch.equal, (q, k, v), heads)) and torch.equal(back, context.own(whole[0]).flatten(2)))
    return same


def model_differences() -> dict[str, dict[str, float]]:
    """Relative difference to the whole model: logits, losses, and the mean of gradients over ranks."""
    context = start()
    return {name: compare_models(context, config) for name, config in {"one": ONE_KV_HEAD, "all": STABILISED}.items()}


def compare_models(context: ContextGroup, config: ModelConfig) -> dict[str, float]:
    cut, whole = objective(config, context), objective(config, None)
    for name in cut.keys() - {"logits", "short logits", "nll", "logsumexp", "kept"}:
        dist.all_reduce(cut[name])
        cut[name] /= context.size
    kept = float(cut.pop("kept") / whole.pop("kept"))
    differences = {name: float((cut[name] - whole[name]).abs().max() / whole[name].abs().max()) for name in whole}
    return {**differences, "kept share": kept}


def objective(config: ModelConfig, context: ContextGroup | None) -> dict[str, Tensor]:
    """Logits, losses with a z-loss, gradients, and how many bytes were kept for backward ("kept")."""
    with torch.device("meta"):
        model = Llama(config)
    if context is not None:
        model.set_context(context)
    materialize(model, config, 3, "cpu")
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, config.vocab_size, (2, 64), generator=generator) for _ in range(2))
    labels[0, 3:5] = IGNORE
    documents = torch.arange(64).expand(2, 64) // 27
    with torch.no_grad():
        found = {"logits": model(ids, documents), "short logits": model(ids[:, :13], documents[:, :13])}
    kept: dict[int, int] = {parameter.data_ptr(): 0 for parameter in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        nll, logsumexp = model(ids, documents, labels, with_logsumexp=True)
        loss = nll.sum() / 20 + 0.01 * logsumexp.square().mean()
    loss.backward()
    found |= {"nll": nll.detach(), "logsumexp": logsumexp.detach(), "kept": torch.tensor(float(sum(kept.values())))}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}
