"""Every attention backend against a naive one in fp64, under random document layouts."""

from __future__ import annotations

import pytest
import torch

from lm.attention import attention, document_lengths, pack
from lm.errors import ConfigError

H, E = 4, 16


def random_layout(B, T, documents, seed):
    """[B, T] ids of up to `documents` documents a window, cut at random places, some of length 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(B, T, dtype=torch.int32)
    for b in range(B):
        cuts = torch.randint(1, T, (documents - 1,), generator=generator)
        ids[b] = torch.zeros(T, dtype=torch.int32).index_add_(0, cuts, torch.ones(documents - 1, dtype=torch.int32))
        ids[b] = ids[b].cumsum(0)
    return ids


def naive(q, k, v, ids, scale, softcap):
    """One query at a time, in fp64: softmax over the keys of its document up to itself."""
    B, T, heads, size = q.shape
    groups = heads // k.shape[2]
    rows = []
    for b in range(B):
        for t in range(T):
            keys = [j for j in range(t + 1) if ids is None or ids[b, j] == ids[b, t]]
            for h in range(heads):
                scores = torch.stack([q[b, t, h] @ k[b, j, h // groups] for j in keys]) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                rows.append(scores.softmax(0) @ v[b, keys, h // groups])
    return torch.stack(rows).view(B, T, heads * size)


def tensors(B, T, K, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, heads, E, generator=generator, dtype=torch.float64) for heads in (H, K, K)]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("documents", [1, 3, 9])
@pytest.mark.parametrize("K", [4, 2])
@pytest.mark.parametrize("backend", ["sdpa", "documents", "flex"])
def test_backends_equal_the_naive_reference(backend, K, documents, softcap):
    B, T = 2, 24
    ids = random_layout(B, T, documents, seed=documents) if documents > 1 else None
    with torch.set_grad_enabled(backend != "flex"):
        packing = pack(ids, (B, T), torch.device("cpu"), backend)
    assert packing.backend == backend
    trains = backend != "flex"  # which has no backward on a CPU
    exact = [x.requires_grad_(trains) for x in tensors(B, T, K, seed=1)]
    ours = [x.detach().float().requires_grad_(trains) for x in exact]
    expected = naive(*exact, ids, 0.3, softcap)
    got = attention(*ours, packing, 0.3, softcap)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    if not trains:
        return
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * weights).sum().backward()
    (got * weights.float()).sum().backward()
    for mine, its in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), its.grad, atol=2e-5, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash-attn needs a CUDA device")
@pytest.mark.parametrize("backend", ["flash", "flex", "sdpa"])
def test_cuda_backends_equal_the_cpu(backend):
    if backend == "flash":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed (extra: flash)")
    ids = random_layout(2, 256, 5, seed=0)
    q, k, v = (x.float() for x in tensors(2, 256, 2, seed=1))
    expected = attention(q, k, v, pack(ids, (2, 256), q.device, "documents"), 0.3)
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    got = attention(q, k, v, pack(ids.cuda(), (2, 256), q.device, backend), 0.3)
    torch.testing.assert_close(got.float().cpu(), expected, atol=3e-2, rtol=3e-2)


def test_lengths_restart_with_each_window():
    ids = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 2]])
    assert document_lengths(ids, 2, 5) == (2, 3, 4, 1)
    assert document_lengths(None, 2, 5) == (5, 5)


def test_auto_goes_by_document_where_that_is_less_work():
    cpu = torch.device("cpu")
    eight = (torch.arange(2048) // 256)[None]
    assert pack(eight, (1, 2048), cpu).backend == "documents"
    assert pack(random_layout(4, 128, 9, seed=0), (4, 128), cpu).backend == "sdpa"  # 36 calls cost more than one mask
    one = pack(torch.zeros(3, 128, dtype=torch.int32), (3, 128), cpu)
    assert one.backend == "sdpa" and one.mask is None


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("fast", "attention must be one of auto, sdpa, documents, flash, flex, got 'fast'"),
        ("flash", "needs a CUDA"),
        ("flex", "no backward on a CPU"),
    ],
)
def test_a_backend_that_cannot_run_is_one_line(backend, message):
    with pytest.raises(ConfigError, match=message):
        pack(None, (1, 8), torch.device("cpu"), backend)
