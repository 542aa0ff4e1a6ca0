"""Which precision and whether to compile: by size of the model, length of the run and what the machine can do."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec

from lm.config import ModelConfig

# Below this width a step on a CPU is many small operations: casts to bf16 cost more than its products save.
MIN_CPU_WIDTH = 256
# Compiling takes about a minute; a run with fewer FLOPs is over before that is won back.
MIN_COMPILE_FLOPS = {"cpu": 1e14, "cuda": 1e16}


@dataclass(frozen=True)
class Machine:
    """What matters of a machine.

    Attributes:
        device: cpu or cuda (or another, for which nothing is chosen).
        bf16: its matrix products are faster in bf16 than in fp32.
        compiler: torch.compile has what it needs: a C++ compiler on a CPU, Triton on CUDA.
    """

    device: str
    bf16: bool
    compiler: bool


@dataclass(frozen=True)
class Choice:
    """Attributes: precision, of Lightning's Trainer; compile, of RuntimeConfig; reason, a phrase for the user."""

    precision: str
    compile: bool
    reason: str


def choose(config: ModelConfig, run_flops: float, machine: Machine) -> Choice:
    """The faster way to train this model on this machine. A pure function.

    On a CPU: fp32 without compilation below d_model 256 and where the CPU has no bf16 matrix units (compiled fp32 was
    not seen to be faster); else bf16. On CUDA: bf16 where it has units for it. Then blocks are compiled, where a
    compiler is at hand and the run is long enough to win the time back.

    Args:
        run_flops: FLOPs of the whole run (lm.plan); 0 where nothing is trained.
    """
    if machine.device not in MIN_COMPILE_FLOPS:
        return Choice("32-true", False, f"nothing is known about {machine.device}")
    if machine.device == "cpu" and config.d_model < MIN_CPU_WIDTH:
        return Choice("32-true", False, f"d_model {config.d_model} is below {MIN_CPU_WIDTH} on a CPU")
    unit = "CPU" if machine.device == "cpu" else "GPU"
    precision = "bf16-mixed" if machine.bf16 else "32-true"
    reason = f"the {unit} has {'' if machine.bf16 else 'no '}bf16 matrix units"
    if unit == "CPU" and not machine.bf16:
        return Choice(precision, False, reason)
    if not machine.compiler:
        return Choice(precision, False, f"{reason}; no {'C++ compiler' if unit == 'CPU' else 'Triton'} to compile with")
    least = MIN_COMPILE_FLOPS[machine.device]
    if run_flops < least:
        return Choice(precision, False, f"{reason}; {run_flops:.2g} FLOPs are too few to compile for ({least:.0e})")
    return Choice(precision, True, f"{reason}; d_model {config.d_model} on a {unit} gains from compilation")


def machine_of(device: str) -> Machine:
    """What this machine can do. device: cpu or cuda."""
    import torch

    if device == "cuda" and torch.cuda.is_available():
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return Machine("cuda", bf16, find_spec("triton") is not None)
    has = torch.cpu.get_capabilities()
    bf16 = bool(has.get("amx_bf16") or has.get("avx512_bf16"))
    compiler = any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))
    return Machine(device, bf16, compiler)
