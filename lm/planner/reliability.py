"""How often a run breaks, and how often to save. Pure functions of rates and seconds."""

from __future__ import annotations

import math

from lm.config import ModelConfig
from lm.plan import count_parameters

DAY_SECONDS = 86_400.0
# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, sec. 3.3.4).
LLAMA_3_FAILURES_PER_DEVICE_DAY = 419 / (54 * 16_384)
# fp32 weight and two fp32 moments: what plugins.strategies.checkpoint writes for AdamW.
CHECKPOINT_BYTES_PER_PARAMETER = 12


def mean_seconds_between_failures(
    failures_per_device_day: float, devices: int, seconds: float = 0.0, failures: int = 0
) -> float:
    """M, from a rate known beforehand and what this run has seen.

    The rate counts as one failure seen in the time M0 in which it is expected: M = (M0 + seconds) / (1 + failures), the
    mean of a gamma-distributed rate after a Poisson observation, inverted.

    Args:
        failures_per_device_day: failures a day of one device.
        devices: that work together; any failure stops all of them.
        seconds: that this run has trained.
        failures: that it has seen in them.
    """
    expected = DAY_SECONDS / (failures_per_device_day * devices)
    return (expected + seconds) / (1 + failures)


def young_interval_seconds(blocked_seconds: float, between_failures_seconds: float) -> float:
    """sqrt(2 delta M): the time between saves that loses least (Young 1974, Commun. ACM 17(9), 530).

    Lost are delta per interval, and half an interval per failure. Daly 2006 (Future Gener. Comput. Syst. 22, 303) has
    terms of higher order, which matter once delta is no longer small against M.
    """
    return math.sqrt(2.0 * blocked_seconds * between_failures_seconds)


def young_lost_share(blocked_seconds: float, between_failures_seconds: float) -> float:
    """Share of the time lost to saves and to work done again, at Young's interval: delta / tau + tau / (2 M)."""
    tau = young_interval_seconds(blocked_seconds, between_failures_seconds)
    return 0.0 if tau == 0 else blocked_seconds / tau + tau / (2 * between_failures_seconds)


def expected_interruptions(failures_per_device_day: float, devices: int, days: float) -> float:
    """Mean number of failures that stop the run."""
    return failures_per_device_day * devices * days


def checkpoint_bytes(config: ModelConfig, bytes_per_parameter: float = CHECKPOINT_BYTES_PER_PARAMETER) -> float:
    """Bytes of a checkpoint that a run restarts from; 14 with a bf16 copy of the weights beside the fp32 ones."""
    return bytes_per_parameter * count_parameters(config).total
