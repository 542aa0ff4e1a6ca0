"""What is to be planned: model, tokens, batch, cluster. Frozen dataclasses that refuse nonsense in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.plan import DEFAULT_FLOP_CONVENTION, FLOP_CONVENTIONS
from lm.planner.devices import Device, find_device
from lm.planner.reliability import LLAMA_3_FAILURES_PER_DEVICE_DAY
from lm.planner.sizes import Surface

PRECISIONS = ("32-true", "bf16-mixed", "fp8")
GB = 1e9
LARGEST, MOST = 1e30, 10**15  # no figure of a run is near; beyond, products overflow


def require(condition: bool, message: str) -> None:
    """Raise ConfigError where the condition does not hold."""
    if not condition:
        raise ConfigError(message)


def check_numbers(place: str, values: Mapping[str, Any], *, zero: bool = False, whole: bool = False) -> None:
    """Raise ConfigError unless all are numbers above 0 (with `zero`: at least 0; with `whole`: integers) of a size that
    some run could have."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
        good = number and (value >= 0 if zero else value > 0) and not (whole and value != int(value))
        kind = ("a whole number " if whole else "a number ") + ("from 0 on" if zero else "above 0")
        require(good, f"{place}{name} must be {kind}, got {value!r}")
        most = MOST if whole else LARGEST
        require(value <= most, f"{place}{name} must be {kind} and at most {most:g}, got {value!r}")


@dataclass(frozen=True)
class Cluster:
    """Devices that train together.

    Attributes:
        device: a name in lm.planner.devices, or the JSON file of `recipes.plan --calibrate`.
        devices: of all nodes.
        devices_per_node: that the fast links join; 0: 8, or all where there are fewer.
        mfu: share of the peak that computing reaches while nothing waits, under the default FLOP convention.
        memory_gb, peak_tflops, link_gb_per_s: in place of the device's own; 0 takes those. GB/s each way.
        network_gb_per_s: between nodes, GB/s a device each way; 50 is NDR InfiniBand with a port a GPU.
        latency_us: of a collective, microseconds a doubling of its ranks.
        reserve: share of the memory that the plan leaves free (allocator, CUDA context, NCCL).
        price_per_hour: of one device, lowest and highest.
        allowance: share added to time and cost for restarts and stops.
        failures_per_device_day: unexpected interruptions; the default is what Llama 3 405B met.
        checkpoint_seconds: that training stands still for a save.
    """

    device: str
    devices: int
    devices_per_node: int = 0
    mfu: float = 0.4
    memory_gb: float = 0.0
    peak_tflops: float = 0.0
    link_gb_per_s: float = 0.0
    network_gb_per_s: float = 50.0
    latency_us: float = 10.0
    reserve: float = 0.1
    price_per_hour: tuple[float, float] = (0.0, 0.0)
    allowance: float = 0.1
    failures_per_device_day: float = LLAMA_3_FAILURES_PER_DEVICE_DAY
    checkpoint_seconds: float = 60.0

    def __post_init__(self) -> None:
        require(isinstance(self.device, str), f"cluster.device must be a name, got {self.device!r}")
        check_numbers("cluster.", {"devices": self.devices}, whole=True)
        check_numbers("cluster.", {"devices_per_node": self.devices_per_node}, whole=True, zero=True)
        require(self.devices <= 1_000_000, f"cluster.devices must be at most 1,000,000, got {self.devices:,}")
        for name in ("devices", "devices_per_node"):
            object.__setattr__(self, name, int(getattr(self, name)))
        if self.devices_per_node == 0:
            object.__setattr__(self, "devices_per_node", min(8, self.devices))
        check_numbers("cluster.", {"mfu": self.mfu, "network_gb_per_s": self.network_gb_per_s})
        optional = ("memory_gb", "peak_tflops", "link_gb_per_s", "latency_us", "reserve", "allowance")
        check_numbers("cluster.", {"checkpoint_seconds": self.checkpoint_seconds}, zero=True)
        check_numbers("cluster.", {name: getattr(self, name) for name in optional}, zero=True)
        check_numbers("cluster.", {"failures_per_device_day": self.failures_per_device_day})
        require(self.mfu <= 1, f"cluster.mfu is a share of the peak, at most 1, got {self.mfu}")
        require(self.reserve < 1, f"cluster.reserve is a share of the memory, below 1, got {self.reserve}")
        prices = self.price_per_hour
        if isinstance(prices, int | float):
            prices = (prices, prices)
        require(
            isinstance(prices, list | tuple) and len(prices) == 2,
            f"cluster.price_per_hour must be a number or [lowest, highest], got {prices!r}",
        )
        check_numbers("cluster.price_per_hour ", {"lowest": prices[0], "highest": prices[1]}, zero=True)
        require(prices[0] <= prices[1], f"cluster.price_per_hour must be [lowest, highest], got {list(prices)}")
        object.__setattr__(self, "price_per_hour", (float(prices[0]), float(prices[1])))
        require(
            self.devices % self.devices_per_node == 0,
            f"cluster.devices {self.devices} does not divide by devices_per_node {self.devices_per_node}; change one",
        )
        require(
            not self.spec.rates or self.devices == 1,
            f"cluster.device {self.device} was measured as one process on all cores; plan it with devices 1",
        )

    @cached_property
    def spec(self) -> Device:
        """The device."""
        return find_device(self.device)

    @property
    def memory_bytes(self) -> float:
        """Of one device."""
        return GB * (self.memory_gb or self.spec.memory_gb)

    @property
    def usable_bytes(self) -> float:
        """Of one device, without the reserve."""
        return self.memory_bytes * (1 - self.reserve)

    def peak_flops(self, kind: str) -> float:
        """FLOP/s of one device in fp32, bf16 or fp8; peak_tflops stands for bf16, and scales the others."""
        peak = self.spec.peak_flops(kind)
        return peak * (1e12 * self.peak_tflops / self.spec.peak_flops("bf16")) if self.peak_tflops else peak

    def bytes_per_s(self, neighbours: int) -> float:
        """Each way, of a group that spans so many neighbouring devices."""
        inside = neighbours <= self.devices_per_node
        return GB * ((self.link_gb_per_s or self.spec.link_gb_per_s) if inside else self.network_gb_per_s)


@dataclass(frozen=True)
class Job:
    """A training run to plan.

    Attributes:
        name: of the run.
        model: its shape.
        tokens: D.
        sequence_length: T.
        global_batch_tokens: tokens an optimizer step; a multiple of T.
        cluster: what it runs on.
        precision: trainer.precision: 32-true, bf16-mixed or fp8.
        lr: peak learning rate; 0 takes the usual one for the size.
        warmup_steps: of the schedule, below `steps`; None: see `warmup`.
        schedule: cosine or wsd.
        flops_convention: of lm.plan.
        data_dir: prepared shards.
        sources: by name (weight, unique tokens).
        surface: fitted loss, or None.
        inference_tokens: that the model will serve in its life; for the inference-aware size.
        layout: settings that the search must keep, by the name of a field of lm.planner.layout.Layout.
    """

    name: str
    model: ModelConfig
    tokens: float
    sequence_length: int
    global_batch_tokens: int
    cluster: Cluster
    precision: str = "bf16-mixed"
    lr: float = 0.0
    warmup_steps: int | None = None
    schedule: str = "cosine"
    flops_convention: str = DEFAULT_FLOP_CONVENTION
    data_dir: str = "data/tokens"
    sources: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    surface: Surface | None = None
    inference_tokens: float = 0.0
    layout: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("name", "data_dir", "flops_convention", "precision", "schedule"):
            value = getattr(self, key)
            require(isinstance(value, str) and value.strip() != "", f"{key} must be a word, got {value!r}")
        require("/" not in self.name, f"name must name a folder, without /, got {self.name!r}")
        check_numbers("", {"tokens": self.tokens})
        sizes = {"sequence_length": self.sequence_length, "global_batch_tokens": self.global_batch_tokens}
        check_numbers("", sizes, whole=True)
        check_numbers("", {"lr": self.lr, "inference_tokens": self.inference_tokens}, zero=True)
        batch, length = self.global_batch_tokens, self.sequence_length
        require(batch % length == 0, f"global_batch_tokens {batch} is no multiple of sequence_length {length}")
        require(
            self.tokens >= batch, f"tokens {self.tokens:g} is less than one optimizer step, global_batch_tokens {batch}"
        )
        require(
            self.precision in PRECISIONS, f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
        )
        require(self.schedule in ("cosine", "wsd"), f"schedule must be cosine or wsd, got {self.schedule!r}")
        require(
            self.flops_convention in FLOP_CONVENTIONS,
            f"flops_convention must be one of {', '.join(FLOP_CONVENTIONS)}, got {self.flops_convention!r}",
        )
        for kind in {"32-true": ("fp32",), "bf16-mixed": ("bf16",), "fp8": ("bf16", "fp8")}[self.precision]:
            self.cluster.peak_flops(kind)
        for source, (weight, unique) in self.sources.items():
            check_numbers(f"sources.{source} ", {"weight": weight, "unique_tokens": unique})
        if self.warmup_steps is not None:
            check_numbers("", {"warmup_steps": self.warmup_steps}, zero=True, whole=True)
            require(
                self.warmup_steps < self.steps,
                f"warmup_steps {self.warmup_steps:g} is not below the run's {self.steps} steps: its learning rate would"
                " never reach the peak; give fewer, or none for the usual number",
            )

    @property
    def sequences(self) -> int:
        """Windows an optimizer step."""
        return self.global_batch_tokens // self.sequence_length

    @property
    def steps(self) -> int:
        """Optimizer steps, to the nearest."""
        return max(1, round(self.tokens / self.global_batch_tokens))

    @property
    def warmup(self) -> int:
        """Warmup steps: those given, else 2,000 as is usual for large runs, a tenth of a shorter one."""
        return min(2000, self.steps // 10) if self.warmup_steps is None else int(self.warmup_steps)

    @property
    def mixed(self) -> bool:
        """Products in 16 (or 8) bits, weights and moments in fp32."""
        return self.precision != "32-true"
