"""How many samples of each source a block of the data order holds. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]

BLOCK_SAMPLES = 1 << 10
MAX_BLOCK_SAMPLES = 1 << 20
WEIGHT_TOLERANCE = 0.01


def largest_remainder(weights: Float64Array, total: int) -> Int64Array:
    """Integer counts in proportion to weights that sum to `total` exactly; ties go to the earlier source."""
    quota = weights / weights.sum() * total
    counts = np.floor(quota).astype(np.int64)
    missing = total - int(counts.sum())
    # Rounded, so that remainders equal but for float noise are ties on every machine.
    order = np.argsort(-np.round(quota - counts, 9), kind="stable")
    counts[order[:missing]] += 1
    return counts


def block_counts(weights: Float64Array) -> Int64Array:
    """Samples of each source in a block; the block (a power of two) grows until each share is within 1%.

    A weight below 5e-5 may be further off, in the largest block; one below 1e-6 gets no sample.
    """
    share = weights / weights.sum()
    size = BLOCK_SAMPLES
    while True:
        counts = largest_remainder(share, size)
        error = np.abs(counts - share * size)
        if np.all(error <= WEIGHT_TOLERANCE * share * size) or size >= MAX_BLOCK_SAMPLES:
            return counts
        size *= 2
