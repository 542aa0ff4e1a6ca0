"""Checksums see every bit, and votes name the rank."""

from __future__ import annotations

import pytest
import torch

from lm.errors import ConfigError
from plugins.callbacks.integrity import Integrity, disagreement
from plugins.strategies import checksums
from plugins.strategies.checksums import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.arange(23).reshape(23, 1).expand(23, 3).to(dtype)
    plain = int(checksum(tensor))
    assert int(checksum(tensor.contiguous())) == plain
    octets = tensor.contiguous().view(torch.uint8).flatten()
    sums = set()
    for bit in range(8 * octets.numel()) if dtype is not torch.bool else range(0, 8 * octets.numel(), 8):
        flipped = octets.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        sums.add(int(checksum(flipped.view(dtype))))
    assert plain not in sums
    assert len(sums) == (8 if dtype is not torch.bool else 1) * octets.numel()  # no two flips look alike


def test_swaps_pairs_and_far_words_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_CPU_WORDS", 64)
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(1000, generator=generator)
    plain = int(checksum(tensor))
    for _ in range(300):
        i, j = torch.randperm(1000, generator=generator)[:2].tolist()
        swapped = tensor.clone()
        swapped[i], swapped[j] = tensor[j], tensor[i]
        assert int(checksum(swapped)) != plain
        pair = tensor.view(torch.int32).clone()
        pair[i] ^= 1 << 4
        pair[j] ^= 1 << 4
        assert int(checksum(pair)) != plain
    rolled = torch.cat([tensor[64:128], tensor[:64], tensor[128:]])  # two chunks change places
    assert int(checksum(rolled)) != plain
    assert int(checksum(-torch.zeros(3))) != int(checksum(torch.zeros(3)))  # equal numbers, other bits
    assert int(checksum(torch.zeros(0))) == 0
    assert int(checksum(torch.tensor(3.0))) == int(checksum(torch.tensor([3.0])))


def test_votes() -> None:
    whole, pieces = [()] * 4, [(0,), (1,), (0,), (1,)]
    assert disagreement(whole, [5, 5, 5, 5]) == ""
    assert disagreement(whole, [5, 7, 5, 5]) == "rank 1 holds other bits than ranks 0, 2 and 3"
    assert disagreement(whole, [5, 7, 5, 7]).startswith("ranks 0, 1, 2 and 3 hold different bits")
    assert disagreement(pieces, [5, 7, 5, 7]) == ""
    assert disagreement(pieces, [5, 7, 5, 8]) == "ranks 1 and 3 hold different bits, one of them is wrong,"


def test_bad_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps"):
        Integrity(-1)
