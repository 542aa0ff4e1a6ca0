"""Settings of a process that trains on CPU cores."""

from __future__ import annotations

import contextlib
import ctypes

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc refuses more


def keep_freed_memory() -> bool:
    """Let the allocator keep what a step frees for the next step, instead of giving it back to the kernel.

    By default glibc maps each large tensor anew, and every page of it faults in and is zeroed again, thousands of times
    a step for a small model. Costs no more memory than the largest step needs, changes no number.

    Returns:
        False where the C library has no such setting (it is glibc's).
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        done = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
        done &= mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        done &= mallopt(_M_TOP_PAD, 64 << 20)
        return bool(done)
    return False
