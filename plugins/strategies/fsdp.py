"""Fully sharded data parallel: each device holds a slice of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lm.errors import ConfigError
from plugins.strategies.checkpoint_io import Reader
from plugins.strategies.context_parallel import check_size, share_windows
from plugins.strategies.parallelize import TENSOR, parallelize
from plugins.strategies.portable import Portable, destroy_process_group_at_exit

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

DType = Literal["auto", "float32", "bfloat16"]


class FSDP(Portable, ModelParallelStrategy):
    """PyTorch's fully_shard over all devices, or over groups of devices that share the work of each matrix.

    The LightningModule's configure_model builds the model on the meta device and hands it to `parallelize`.

    Args:
        tensor_parallel: devices, of one node, that cut each matrix between them and work on the same batch; the model
            is sharded over world size / tensor_parallel. 1 for none. See tensor_parallel.py.
        context_parallel: neighbouring devices (with tensor_parallel: neighbouring groups of them) that cut each window
            of tokens between them, so that activations are a context_parallel-th; they exchange heads for positions
            around attention. Parameters stay sharded over all of them. 1 for none. See lm/context_parallel.py.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory and update there (CUDA only).
        reshard_after_forward: free gathered parameters after forward; False is faster and needs more memory.
        param_dtype: dtype of gathered parameters; auto is bfloat16 under trainer.precision bf16-mixed, else float32.
        reduce_dtype: dtype in which gradients are averaged.
        reduce_every_micro_batch: with gradient accumulation, average and shard gradients after each micro-batch
            (less memory) rather than once per optimizer step (less communication).
        process_group_backend: gloo, nccl; None chooses by device.
        timeout_seconds: how long a rank waits for the others.

    Raises:
        ConfigError: when training starts; tensor_parallel does not divide the devices of a node or the model,
            context_parallel the devices, heads or windows, or cpu_offload without CUDA.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        reshard_after_forward: bool = True,
        param_dtype: DType = "auto",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        reduce_every_micro_batch: bool = False,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800,
        tensor_parallel: int = 1,
        cpu_offload: bool = False,
        context_parallel: int = 1,
    ) -> None:
        check_size(self.strategy_name, context_parallel)
        if tensor_parallel < 1:
            raise ConfigError(f"{self.strategy_name} tensor_parallel must be at least 1, got {tensor_parallel}")
        if cpu_offload and process_group_backend == "nccl":
            raise ConfigError(
                f"{self.strategy_name} cpu_offload sums norms in CPU memory, which nccl does not reach; leave "
                "process_group_backend out"
            )
        if cpu_offload and process_group_backend is None:
            process_group_backend = "cpu:gloo,cuda:nccl"  # norms of gradients are summed where the gradients are
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_seconds))
        self.reshard_after_forward = reshard_after_forward
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.reduce_every_micro_batch = reduce_every_micro_batch
        self.tensor_parallel = tensor_parallel
        self.cpu_offload = cpu_offload
        self.context_parallel = context_parallel

    def data_mesh_sizes(self) -> dict[str, int]:
        """Sizes by name of the mesh dimensions that a batch is spread over."""
        return {"shard": self.world_size // self.tensor_parallel}

    def build_mesh(self) -> DeviceMesh:
        """The mesh parameters are cut over; the tensor dimension is the innermost, so its devices are neighbours."""
        if self.num_processes % self.tensor_parallel:
            raise ConfigError(
                f"{self.strategy_name} tensor_parallel {self.tensor_parallel} does not divide the "
                f"{self.num_processes} devices of a node; choose a divisor of {self.num_processes}"
            )
        sizes = self.data_mesh_sizes()
        if self.tensor_parallel > 1:
            sizes[TENSOR] = self.tensor_parallel
        mesh = init_device_mesh(self.root_device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if self.tensor_parallel > 1:
            mesh["shard", TENSOR]._flatten("shard_tensor")  # sums of squares for the norm in one exchange, not two
        return mesh

    def setup_environment(self) -> None:
        if self.cpu_offload and self.root_device.type != "cuda":
            raise ConfigError(
                f"{self.strategy_name} cpu_offload needs CUDA, this run is on {self.root_device.type}, where all is in "
                "CPU memory already; turn it off"
            )
        # Not ModelParallelStrategy's: it would build a (data, tensor) mesh of its own.
        self._setup_distributed()
        destroy_process_group_at_exit()
        self._device_mesh = self.build_mesh()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def parallelize(self, model: nn.Module) -> nn.Module:
        dtype = self.param_dtype
        if dtype == "auto":
            dtype = "bfloat16" if self.precision_plugin.precision == "bf16-mixed" else "float32"
        share_windows(model, self)
        return parallelize(
            model,
            self.device_mesh,
            param_dtype=torch.bfloat16 if dtype == "bfloat16" else None,
            reduce_dtype=getattr(torch, self.reduce_dtype),
            reshard_after_forward=self.reshard_after_forward,
            cpu_offload=self.cpu_offload,
        )

    @property
    def parameter_device(self) -> torch.device:
        return torch.device("cpu") if self.cpu_offload else self.root_device

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.parameter_device)

    def setup(self, trainer: Trainer) -> None:
        if not self._roots():
            raise ConfigError(
                f"nothing is sharded: {type(trainer.lightning_module).__name__}.configure_model must call "
                "self.trainer.strategy.parallelize(model)"
            )
        super().setup(trainer)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        rank, parts = self.data_parallel
        return {"num_replicas": parts, "rank": rank}

    def collect(self, with_optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        self._reshard()
        return super().collect(with_optimizer)

    def restore(self, reader: Reader, with_optimizer: bool) -> None:
        self._reshard()
        super().restore(reader, with_optimizer)

    def _reshard(self) -> None:
        """Put the shards back: after a forward without backward (validation) the root's parameters stay gathered."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients of this micro-batch local (Lightning's version knows DDP only)."""
        if self.reduce_every_micro_batch:
            yield
            return
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, sync: bool) -> None:
        for root in self._roots():
            root.set_requires_gradient_sync(sync)

    def _roots(self) -> list[FSDPModule]:
        """Outermost sharded modules."""
        assert self.lightning_module is not None
        sharded = [(name, m) for name, m in self.lightning_module.named_modules() if isinstance(m, FSDPModule)]
        outer = [
            (name, m)
            for name, m in sharded
            if not any(name != other and (other == "" or name.startswith(f"{other}.")) for other, _ in sharded)
        ]
        return [m for _, m in outer]
