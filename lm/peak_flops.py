"""Dense bf16 peak of common GPUs, for model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

# TFLOP/s by a part of the device's name; data sheets that double the figure for sparsity are halved.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362, "L4": 121,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip


def peak_tflops(name: str) -> float:
    """Dense bf16 TFLOP/s of a GPU by its name; 0 where it is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if all(word in name for word in part.split())), 0.0)
