"""Accelerators by name: dense peaks, memory, link speeds. One table for the planner, MFU figures and benchmarks.

Peaks are dense: data sheets that give tensor-core figures with 2:4 sparsity are halved. GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

PRECISIONS = ("fp32", "bf16", "fp8")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        name: as its maker calls it.
        tflops: dense peak in TFLOP/s by fp32, bf16, fp8; what is missing the device does not have.
        memory_gb: GB of device memory.
        memory_gb_per_s: bandwidth of that memory, GB/s.
        link_gb_per_s: to the other devices of a node, GB/s each way.
        source: where the figures are from.
        rates: of a measured machine: seconds by what they are spent on, see lm.planner.timing.work; else empty.
    """

    name: str
    tflops: Mapping[str, float]
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float
    source: str
    rates: Mapping[str, float] = field(default_factory=dict)

    def peak_flops(self, precision: str) -> float:
        """FLOP/s.

        Raises:
            ConfigError: the device has no such precision.
        """
        if precision not in self.tflops:
            raise ConfigError(f"cluster.device {self.name} has no {precision}; it has {', '.join(self.tflops)}")
        return 1e12 * self.tflops[precision]


def _device(
    name: str, fp32: float, bf16: float, fp8: float, memory: float, bandwidth: float, link: float, source: str
) -> Device:
    peaks = {"fp32": fp32, "bf16": bf16, "fp8": fp8}
    return Device(name, {kind: peak for kind, peak in peaks.items() if peak}, memory, bandwidth, link, source)


# NVLink: half of the total of a data sheet is each way. PCIe 4.0 x16: 32 GB/s each way, 5.0 x16: 64.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("A100", 19.5, 312, 0, 80, 2039, 300, "NVIDIA A100 80GB SXM data sheet; NVLink 600 GB/s both ways"),
        _device("H100 PCIe", 51, 756, 1513, 80, 2000, 64, "NVIDIA H100 PCIe data sheet, sparse figures halved"),
        _device("H100 NVL", 60, 835, 1671, 94, 3900, 300, "NVIDIA H100 data sheet, sparse figures halved"),
        _device("H100", 67, 989, 1979, 80, 3350, 450, "NVIDIA H100 SXM data sheet, sparse figures halved; NVLink 4"),
        _device("H200", 67, 989, 1979, 141, 4800, 450, "NVIDIA H200 SXM data sheet, sparse figures halved; NVLink 4"),
        _device("B200", 75, 2250, 4500, 180, 7700, 900, "NVIDIA HGX B200 data sheet / 8, sparse halved; NVLink 5"),
        _device("L40S", 91.6, 362, 733, 48, 864, 32, "NVIDIA L40S data sheet; PCIe 4.0"),
        _device("L4", 30.3, 121, 242, 24, 300, 32, "NVIDIA L4 data sheet, sparse figures halved; PCIe 4.0"),
        _device("RTX 4090", 82.6, 165.2, 330.3, 24, 1008, 32, "NVIDIA Ada whitepaper, fp32 accumulation; PCIe 4.0"),
        _device("RTX 3090", 35.6, 71, 0, 24, 936, 32, "NVIDIA GA102 whitepaper, fp32 accumulation; PCIe 4.0"),
        _device("MI300X", 163.4, 1307.4, 2614.9, 192, 5300, 448, "AMD MI300X data sheet; 7 links of 64 GB/s each way"),
        _device("TPU v5p", 0, 459, 0, 95, 2765, 600, "Google Cloud TPU v5p page; ICI 4,800 Gbit/s a chip"),
    )
}


def peak_tflops(name: str) -> float:
    """Dense bf16 TFLOP/s of a GPU by the name its driver gives, such as 'NVIDIA H100 80GB HBM3'; 0 where not known."""
    words = set(re.findall(r"\w+", name))  # an L40 is no L4
    known = next((d for d in DEVICES.values() if words.issuperset(d.name.split())), None)
    return 0.0 if known is None else known.tflops["bf16"]


def _measured(device: Device) -> Device:
    """The device of a file, if its figures are figures.

    Raises:
        ValueError: one is not; also a TypeError or AttributeError where a section is none.
    """
    sizes = [device.memory_gb, device.memory_gb_per_s, device.link_gb_per_s, *device.rates.values()]
    if not all(0 < value < 1e30 for value in device.tflops.values()) or not all(0 <= value < 1e30 for value in sizes):
        raise ValueError("its figures must be numbers above 0")
    return device


def find_device(name: str) -> Device:
    """A known device, or one that `recipes.plan --calibrate` measured, by the path of its JSON file.

    Raises:
        ConfigError: neither.
    """
    if name in DEVICES:
        return DEVICES[name]
    if name.endswith(".json"):
        try:
            values: dict[str, Any] = json.loads(Path(name).read_text(encoding="utf-8"))["device"]
            return _measured(Device(**values))  # a field that is missing or unknown is a TypeError
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"cluster.device {name} is no measured device ({error}); make it with recipes.plan --calibrate {name}"
            ) from None
    raise ConfigError(
        f"cluster.device {name!r} is unknown; take one of {', '.join(DEVICES)}, or the JSON file of a calibration"
    )


def as_values(device: Device) -> dict[str, Any]:
    """Plain values, for JSON."""
    return asdict(device)
