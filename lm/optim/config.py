"""Settings of the optimizer. Standard library only, so that sweeps check them before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from lm.errors import ConfigError
from lm.optim.schedule import ScheduleConfig


@dataclass(frozen=True)
class MuonConfig:
    """Muon on the hidden matrices (optim.name muon).

    Attributes:
        lr: peak learning rate; null: optim.lr, which is what the scaling match_rms_adamw is for.
        momentum: of the gradient's running mean.
        nesterov: look one step ahead of the momentum.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: of their matrix products: bfloat16, float32, or auto, bfloat16 on CUDA and float32 on a CPU.
        weight_decay: decoupled decay of the matrices; null: optim.weight_decay.
        scaling: of the update by the matrix's shape: match_rms_adamw or original, see lm.optim.muon.update_scale.
    """

    lr: float | None = None
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_dtype: str = "auto"
    weight_decay: float | None = None
    scaling: str = "match_rms_adamw"

    def __post_init__(self) -> None:
        if self.scaling not in ("match_rms_adamw", "original"):
            raise ConfigError(f"optim.muon.scaling must be match_rms_adamw or original, got {self.scaling!r}")
        if self.lr is None and self.scaling == "original":
            raise ConfigError(
                "optim.muon.scaling original has a learning rate of its own: set optim.muon.lr (say 0.02)"
            )
        if self.lr is not None and not self.lr > 0:
            raise ConfigError(f"optim.muon.lr must be positive, or null for optim.lr, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"optim.muon.momentum must be in [0, 1), got {self.momentum}")
        if not 1 <= self.ns_steps < 100:
            raise ConfigError(f"optim.muon.ns_steps must be from 1 to 99, got {self.ns_steps}")
        if self.ns_dtype not in ("auto", "bfloat16", "float32"):
            raise ConfigError(f"optim.muon.ns_dtype must be auto, bfloat16 or float32, got {self.ns_dtype!r}")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ConfigError(f"optim.muon.weight_decay must not be negative, got {self.weight_decay}")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), or Muon and AdamW, and the schedule.

    Attributes:
        name: adamw: all parameters; muon: Muon for hidden matrices, AdamW for embedding, norms and head.
        lr: peak learning rate of embedding, norms and head, and of hidden matrices too unless muP scales them.
        betas: AdamW's decay rates of the two moments.
        eps: added to the root of AdamW's second moment.
        weight_decay: decoupled decay of hidden matrices; embedding, head and norms have none.
        schedule: shape of the learning rate over the run, the same for all parameters.
        muon: settings of Muon.
    """

    name: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        if self.name not in ("adamw", "muon"):
            raise ConfigError(f"optim.name must be adamw or muon, got {self.name!r}")
        if not self.lr > 0:
            raise ConfigError(f"optim.lr must be positive, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be two numbers in [0, 1), got {self.betas}")
        if self.weight_decay < 0 or self.eps <= 0:
            raise ConfigError("optim.weight_decay must not be negative and optim.eps must be positive")
