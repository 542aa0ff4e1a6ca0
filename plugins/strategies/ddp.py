"""Data parallel: every device holds the whole model and works on its part of the batch."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from plugins.strategies.context_parallel import check_size
from plugins.strategies.portable import Portable


class DDP(Portable, DDPStrategy):
    """torch DistributedDataParallel; gradients are averaged once per optimizer step.

    Args:
        bucket_cap_mb: gradients are averaged in pieces of about this many megabytes while backward still runs.
        find_unused_parameters: needed only when some parameters take no part in a step.
        static_graph: the same operations run in every step, so DDP may plan ahead.
        process_group_backend: gloo, nccl; None chooses by device.
        timeout_seconds: how long a rank waits for the others.
        context_parallel: neighbouring devices that cut each window between them; see FSDP.

    Raises:
        ConfigError: see FSDP.
    """

    strategy_name = "ddp"

    def __init__(
        self,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800,
        context_parallel: int = 1,
    ) -> None:
        check_size(self.strategy_name, context_parallel)
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # buffers here are computed the same on every rank
        )
        self.context_parallel = context_parallel

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        rank, parts = self.data_parallel
        return {"num_replicas": parts, "rank": rank}
