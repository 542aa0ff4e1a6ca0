"""Selective checkpointing keeps what attention computed also where attention is a kernel of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm import attention
from lm.activations import run_block


class Counted(nn.Module):
    """A block that counts how often its attention is computed."""

    def __init__(self, attend: Any):
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x.sin()).cos()


def operator(name: str) -> tuple[Any, list[int]]:
    """An operator of torch that returns its argument, and a list that grows by one whenever it is computed."""
    calls: list[int] = []

    @torch.library.custom_op(name, mutates_args=())
    def attend(x: Tensor) -> Tensor:
        calls.append(1)
        return x.clone()

    attend.register_fake(torch.empty_like)
    attend.register_autograd(lambda context, grad: grad)
    return attend, calls


def computed(block: nn.Module, calls: list[int], kind: str) -> int:
    calls.clear()
    x = torch.randn(3, requires_grad=True)
    run_block(block, kind, x).sum().backward()
    expected = -(x.sin().sin() * x.cos()).detach()
    torch.testing.assert_close(x.grad, expected)
    return len(calls)


def test_an_operator_of_flash_attn_is_computed_once():
    attend, calls = operator("flash_attn::_flash_attn_varlen_forward")
    block = Counted(attend)
    assert [computed(block, calls, kind) for kind in ("none", "selective", "full")] == [1, 1, 2]
    other, calls = operator("scalewright_test::another")
    assert computed(Counted(other), calls, "selective") == 2


def test_compiled_flex_attention_is_computed_once(monkeypatch: pytest.MonkeyPatch):
    attend, calls = operator("scalewright_test::inside")
    monkeypatch.setattr(attention, "_plain_flex", lambda: lambda x: attend(x))
    attention._compiled_flex.cache_clear()
    block = Counted(attention._compiled_flex())
    attention._compiled_flex.cache_clear()
    assert [computed(block, calls, kind) for kind in ("none", "selective", "full")] == [1, 1, 2]
