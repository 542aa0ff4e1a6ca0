"""The loss from final states against the plain one in fp64, whole and in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lm.loss import IGNORE, token_nll

B, T, D, V = 3, 7, 16, 50


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, 3] = labels[2, 6] = IGNORE
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain(x, weight, labels, softcap):
    """Loss and logsumexp of the full table of logits."""
    logits = x @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return nll.view(B, T), logits.logsumexp(-1)


def objective(nll, logsumexp):
    """A mean with unequal weights, and a z-loss."""
    weights = torch.linspace(0.5, 1.5, B * T, dtype=nll.dtype).view(B, T)
    return (weights * nll).mean() + 0.1 * logsumexp.square().mean()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows", [1, 4, 21, 100])
def test_values_and_gradients_equal_the_plain_loss(rows, softcap):
    x, weight, labels = inputs()
    nll, logsumexp = token_nll(x, weight, labels, softcap=softcap, chunk_elements=rows * V)
    objective(nll, logsumexp).backward()
    x64, weight64, _ = inputs(torch.float64)
    nll64, logsumexp64 = plain(x64, weight64, labels, softcap)
    objective(nll64, logsumexp64).backward()
    assert nll.dtype == torch.float32 and nll.shape == (B, T)
    assert nll[0, 3] == 0 and nll[2, 6] == 0
    for ours, theirs in ((nll, nll64), (logsumexp, logsumexp64), (x.grad, x64.grad), (weight.grad, weight64.grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)


def test_chunks_do_not_change_the_gradient_of_an_ignored_position():
    x, weight, labels = inputs()
    token_nll(x, weight, labels, chunk_elements=2 * V)[0].sum().backward()
    assert (x.grad[0, 3] == 0).all() and (x.grad[0, 2] != 0).any()


def test_large_logits_stay_finite():
    x, weight, labels = inputs()
    nll, logsumexp = token_nll(1e4 * x, weight, labels)
    assert nll.isfinite().all() and logsumexp.isfinite().all()


@pytest.mark.parametrize("rows", [4, 100])
def test_under_autocast_products_run_in_bf16_and_gradients_have_the_parameters_dtype(rows):
    x, weight, labels = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll, _ = token_nll(x, weight, labels, chunk_elements=rows * V)
    nll.sum().backward()
    rounded = (x.detach().bfloat16() @ weight.detach().bfloat16().T).float()
    expected = F.cross_entropy(rounded.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(nll.detach().flatten(), expected, rtol=1e-6, atol=1e-6)
    assert weight.grad.dtype == x.grad.dtype == torch.float32
    x64, weight64, _ = inputs(torch.float64)
    plain(x64, weight64, labels, None)[0].sum().backward()
    relative = (weight.grad - weight64.grad).norm() / weight64.grad.norm()
    assert 1e-5 < relative < 2e-2  # rounded, and only rounded


def test_without_gradients_nothing_is_kept():
    x, weight, labels = inputs()
    with torch.no_grad():
        nll, _ = token_nll(x, weight, labels)
    assert nll.grad_fn is None
