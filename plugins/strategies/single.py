"""One process, one device."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lm.errors import ConfigError
from plugins.strategies.portable import Portable


class Single(Portable, SingleDeviceStrategy):
    """Plain training in one process, with the checkpoints of the other strategies."""

    strategy_name = "single"

    def __init__(self) -> None:
        super().__init__()
        # Lightning fills this in from trainer.accelerator and trainer.devices.
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    def setup_environment(self) -> None:
        n_devices = len(self.parallel_devices or []) * self.num_nodes
        if n_devices > 1:
            raise ConfigError(
                f"strategy single runs on one device, trainer.devices x trainer.num_nodes is {n_devices}; "
                "use ddp, fsdp, hsdp, zero1, zero2 or zero3"
            )
        super().setup_environment()
