"""Runs parts of the recipe on fake CUDA tensors: python -m tests.fake_cuda.jobs LIBRARY.

A fake tensor has a shape, a dtype and a device but no values. Operations check all three as on a GPU, so that a tensor
left behind on the CPU, a dtype that a kernel would refuse, or a value read in the middle of a step ends the job. The
library is device.cpp compiled: without it autograd does not run over CUDA tensors on a build of torch for CPUs. It has
to be loaded before torch.
"""

from __future__ import annotations

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])

import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lm import attention
from lm.config import ModelConfig, MuPConfig, RuntimeConfig
from lm.evaluation.text import losses
from lm.model import Llama
from lm.optim.build import make_optimizer
from lm.optim.config import OptimConfig
from lm.rope_scaling import RopeScaling
from plugins.callbacks.qk_clip import QKClip, group_factors, row_factors, scale_rows
from plugins.strategies.gradients import clip_to_norm, global_norm, optimized_parameters

B, T, V = 2, 256, 300
LENGTHS = (100, 156, 256)  # of the documents in the batch
MODEL = ModelConfig(V, 128, 2, 4, n_kv_heads=2)
VARIANTS = {
    "plain": MODEL,
    "stabilised": ModelConfig(V, 128, 2, 4, n_kv_heads=2, qk_norm=True, attention_softcap=30.0, final_softcap=20.0),
    "tied": ModelConfig(V, 128, 2, 4, tie_embeddings=True, rope_scaling=RopeScaling("dynamic", 2.0, 128)),
    "mup": ModelConfig(V, 128, 2, 4, mup=MuPConfig(), rope_scaling=RopeScaling("yarn", 4.0, 64)),
}


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What flash-attn 2 demands of its arguments, and an output of the right shape."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16), q.dtype
    assert all(x.is_cuda and x.dim() == 3 for x in (q, k, v)) and q.shape[1] % k.shape[1] == 0
    assert cu_q.is_cuda and cu_k.is_cuda and cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q.shape == cu_k.shape == (len(LENGTHS) + 1,)
    assert set(options) <= {"softmax_scale", "causal", "softcap"} and options["causal"] is True
    assert max_q == max_k and max_q >= max(LENGTHS)
    groups = q.shape[1] // k.shape[1]
    return q * (k + v).sum(0).repeat_interleave(groups, dim=0)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, block_mask: Any, scale: float, enable_gqa: bool
) -> Tensor:
    """FlexAttention on fake tensors: the devices of its block mask, and an output of the right shape."""
    assert block_mask.kv_indices.is_cuda and block_mask.kv_num_blocks.is_cuda
    groups = q.shape[1] // k.shape[1]
    assert enable_gqa == (groups > 1)
    return q * (k + v).sum(2, keepdim=True).repeat_interleave(groups, dim=1)


@contextmanager
def fake_device() -> Iterator[None]:
    """Fake tensors, with what cannot run on them replaced: reading document boundaries, and attention's own kernels."""
    flash: Any = ModuleType("flash_attn")
    flash.flash_attn_varlen_func = flash_attn_varlen_func
    sys.modules["flash_attn"] = flash
    lengths = lambda document_ids, B, T: (T,) * B if document_ids is None else LENGTHS  # noqa: E731
    attention.document_lengths = lengths
    attention._compiled_flex = lambda: flex_attention
    attention.find_spec = lambda name: flash
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    with FakeTensorMode():
        yield


def on_device(config: ModelConfig, runtime: RuntimeConfig = RuntimeConfig()) -> Llama:
    """Not through the meta device, as a run makes it: fake tensors cannot be exchanged for others."""
    with torch.device("cuda"):
        return Llama(config, runtime)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, V, (B, T), device="cuda")
    return {"input_ids": ids, "document_ids": torch.zeros(B, T, dtype=torch.int32, device="cuda"), "labels": ids}


def train(config: ModelConfig, optim: OptimConfig, runtime: RuntimeConfig, half: bool, steps: int = 2) -> None:
    """Steps as the LightningModule and the strategies make them; all that comes out must be on the device."""
    model = on_device(config, runtime)
    dtype = torch.bfloat16 if half else torch.float32
    optimizer = make_optimizer(model, config, optim)
    for _ in range(steps):
        inputs = batch()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            nll, logsumexp = model(*inputs.values(), with_logsumexp=True)
            assert model.blocks[0].mlp.w_up.weight.mm(torch.ones(MODEL.d_model, 1, device="cuda")).dtype == dtype
        (nll.sum() / nll.numel() + 1e-4 * logsumexp.square().mean()).backward()
        parameters = optimized_parameters(optimizer)
        norm = global_norm(parameters)
        clip_to_norm(parameters, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        assert nll.is_cuda and norm.is_cuda and nll.dtype == norm.dtype == torch.float32
    assert len(parameters) == len(list(model.parameters()))
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert moments and all(value.is_cuda for value in moments), [value.device for value in moments]


def backends() -> None:
    for backend, half in itertools.product(("auto", "sdpa", "documents", "flash", "flex"), (False, True)):
        train(VARIANTS["stabilised"], OptimConfig(), RuntimeConfig(attention=backend), half, steps=1)


def optimizers() -> None:
    for name, variant in (("adamw", "plain"), ("adamw", "tied"), ("muon", "mup"), ("muon", "tied")):
        train(VARIANTS[variant], OptimConfig(name=name), RuntimeConfig(), half=True)


def recomputation() -> None:
    for kind, backend in itertools.product(("selective", "full"), ("sdpa", "flash", "flex")):
        runtime = RuntimeConfig(attention=backend, activation_checkpointing=kind)
        train(VARIANTS["plain"], OptimConfig(), runtime, half=True, steps=1)


def qk_clip() -> None:
    for backend in ("sdpa", "documents", "flash", "flex"):
        model = on_device(MODEL, RuntimeConfig(attention=backend))
        callback = QKClip(threshold=100.0)
        trainer: Any = SimpleNamespace(strategy=SimpleNamespace(), accumulate_grad_batches=1)
        callback.on_fit_start(trainer, model)
        model(*batch().values())
        largest = callback._reduced(0, 1)
        assert largest.is_cuda and largest.shape == (MODEL.n_layers, MODEL.n_heads)
        shrink = group_factors(largest, 100.0, MODEL.n_kv_heads)
        scale_rows(
            [item for layer, row in zip(callback._layers, shrink, strict=True) for item in row_factors(layer, row)]
        )


def evaluation() -> None:
    on_host = [x.cpu() for x in batch().values()]
    nats = losses(on_device(MODEL), on_host[0], on_host[2], on_host[1])
    assert nats.device.type == "cpu" and nats.dtype == torch.float64 and nats.shape == (B, T)


def offloaded() -> None:
    """Parameters in CPU memory, cut over a mesh of CUDA devices, as fully_shard's cpu_offload leaves them."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with unset_fake_temporarily():  # a mesh reads its own numbers
            mesh = DeviceMesh("cuda", [0, 1])
        kept = DTensor.from_local(torch.zeros(64, 128, device="cuda"), mesh, [Shard(0)], run_check=False).to("cpu")
        matrix = torch.nn.Parameter(kept)
        matrix.grad = torch.ones_like(matrix)
        optimizer = make_optimizer(on_device(MODEL), MODEL, OptimConfig(name="muon"))
        (group,) = (group for group in optimizer.param_groups if group["optimizer"] == "muon")
        group["params"] = [matrix]
        optimizer.step()
        scale_rows([(matrix, torch.ones(128, device="cuda"))])  # scores are seen on the device
        assert matrix.to_local().device.type == "cpu"
    finally:
        dist.destroy_process_group()


def catches() -> None:
    """What the other jobs rely on: a tensor left on the CPU is found in forward and in backward."""
    model = on_device(MODEL)
    try:
        model(torch.zeros(B, T, dtype=torch.int64))
    except RuntimeError as error:
        assert "same device" in str(error), error
    else:
        raise AssertionError("ids on the CPU went through")
    table = torch.zeros(T, requires_grad=True, device="cuda")
    assert isinstance(table, FakeTensor)


JOBS: tuple[Callable[[], None], ...] = (catches, backends, optimizers, recomputation, qk_clip, evaluation, offloaded)


def main() -> None:
    """Run all jobs; a line for each that passed, the traceback of each that did not."""
    with fake_device():  # one for all: lm.rope keeps its tables
        for job in JOBS:
            try:
                job()
                print(f"passed {job.__name__}", flush=True)
            except Exception:
                print(f"failed {job.__name__}\n{traceback.format_exc()}", flush=True)


if __name__ == "__main__":
    main()
