"""Keyed pseudo-random permutations of [0, n) that can be evaluated at any point, vectorised. numpy only.

A Feistel network over the smallest power of two that holds n, with cycle walking back into [0, n) (Black and Rogaway
2002, "Ciphers with arbitrary finite domains", method 2). Affine maps (a x + b mod n) would be cheaper, but leave the
same distance between neighbours in every epoch.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Uint64Array = NDArray[np.uint64]

ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: Uint64Array) -> Uint64Array:
    """Finalizer of splitmix64 (Steele et al. 2014): a bijection of 64-bit words in which every input bit spreads."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: object) -> int:
    """64-bit key of a tuple of plain values, the same on every machine and Python version."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def subkeys(key: int, numbers: NDArray[np.int64]) -> Uint64Array:
    """One key per number (an epoch, a block) from a parent key; uint64, same shape as `numbers`."""
    return mix64(np.uint64(key) ^ mix64(numbers.astype(np.uint64) + _GOLDEN))


def _feistel(x: Uint64Array, key: Uint64Array, left_bits: Uint64Array, right_bits: Uint64Array) -> Uint64Array:
    left_mask = (np.uint64(1) << left_bits) - np.uint64(1)
    right_mask = (np.uint64(1) << right_bits) - np.uint64(1)
    left, right = x >> right_bits, x & right_mask
    round_key = key
    for round_number in range(ROUNDS):
        round_key = round_key + _GOLDEN
        if round_number % 2 == 0:
            left = left ^ (mix64(right ^ mix64(round_key)) & left_mask)
        else:
            right = right ^ (mix64(left ^ mix64(round_key)) & right_mask)
    return (left << right_bits) | right


def permute(x: NDArray[np.int64], n: NDArray[np.int64] | int, key: Uint64Array | int) -> NDArray[np.int64]:
    """Value of the permutation of [0, n) with this key at each x.

    Args:
        x: int64, any shape, 0 <= x < n.
        n: size of the domain, one for all or one for each x; at least 1.
        key: uint64, one for all or one for each x. Equal (n, key) is one permutation.

    Returns:
        int64, shape of x, in [0, n).
    """
    shape = np.shape(x)
    size = np.broadcast_to(np.asarray(n, dtype=np.uint64), shape).reshape(-1)
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), shape).reshape(-1)
    value = np.asarray(x).astype(np.uint64).reshape(-1)
    # Bits of n - 1, at least 2, through exact integer comparisons (float logarithms round near powers of two).
    powers = np.uint64(1) << np.arange(63, dtype=np.uint64)
    bits = np.maximum(np.searchsorted(powers, size, side="left"), 2).astype(np.uint64)
    left_bits = bits >> np.uint64(1)
    right_bits = bits - left_bits
    value = _feistel(value, keys, left_bits, right_bits)
    outside = np.flatnonzero(value >= size)
    while outside.size:
        value[outside] = _feistel(value[outside], keys[outside], left_bits[outside], right_bits[outside])
        outside = outside[value[outside] >= size[outside]]
    return value.astype(np.int64).reshape(shape)
