"""DeepSpeed ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054), on CUDA and on CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.errors import ConfigError
from plugins.strategies import checkpoint_io, deepspeed_config, deepspeed_muon, deepspeed_state, state
from plugins.strategies.context_parallel import check_size
from plugins.strategies.portable import Portable, destroy_process_group_at_exit, report_differences


class ZeRO(Portable, DeepSpeedStrategy):
    """Stage 1 cuts optimizer state over the devices, stage 2 gradients too, stage 3 parameters too.

    Precision bf16-mixed means autocast over fp32 parameters, as under the other strategies, and not DeepSpeed's own
    bf16 engine: communication is fp32, the states in a checkpoint are the same.

    Args:
        stage: 1, 2 or 3.
        offload_optimizer: keep optimizer state in CPU memory and update there, with torch's own AdamW.
        offload_parameters: keep parameter shards in CPU memory (stage 3).
        overlap_comm: average gradients while backward runs; None is on for CUDA, off for CPU.
        reduce_bucket_size: gradient elements averaged at once.
        allgather_bucket_size: parameter elements gathered at once.
        config: further DeepSpeed settings, nested as in its documentation, such as {zero_optimization:
            {sub_group_size: 100000000}}; see deepspeed_config.merge.
        process_group_backend: gloo, nccl; None chooses by device.
        timeout_seconds: how long a rank waits for the others.
        context_parallel: neighbouring devices that cut each window between them; see FSDP.

    Raises:
        ConfigError: DeepSpeed is not installed, an unknown stage, `config` sets what something else sets, or, when
            training starts, what DeepSpeed itself refuses.
    """

    strategy_name = "zero"

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        overlap_comm: bool | None = None,
        reduce_bucket_size: int = 200_000_000,
        allgather_bucket_size: int = 200_000_000,
        config: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800,
        context_parallel: int = 1,
    ) -> None:
        check_size(self.strategy_name, context_parallel)
        if find_spec("deepspeed") is None:
            raise ConfigError("strategy zero needs DeepSpeed: pip install 'scalewright[deepspeed]'")
        if stage not in (1, 2, 3):
            raise ConfigError(f"ZeRO has stages 1, 2 and 3, got {stage}")
        if offload_parameters and stage != 3:
            raise ConfigError(f"offload_parameters needs ZeRO stage 3, got stage {stage}")
        self.stage = stage
        self._overlap_comm = overlap_comm
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            overlap_comm=bool(overlap_comm),
            reduce_bucket_size=reduce_bucket_size,
            allgather_bucket_size=allgather_bucket_size,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.context_parallel = context_parallel
        assert isinstance(self.config, dict)
        if offload_optimizer:
            self.config["zero_force_ds_cpu_optimizer"] = False  # its own Adam is compiled at the first start
        self.config = deepspeed_config.merge(self.config, config or {})
        self._forward_redirection = _AutocastRedirection(self)

    # Set-up ---------------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # DeepSpeed wants an index

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if type(plugin) is DeepSpeedPrecision:
            plugin = _ZeROPrecision(plugin.precision)  # type: ignore[arg-type]
        elif hasattr(plugin, "convert_model"):
            raise ConfigError("precision fp8 does not run under DeepSpeed; use single, ddp, fsdp or hsdp")
        DeepSpeedStrategy.precision_plugin.fset(self, plugin)  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CUDAAccelerator):
            _require_cpu_accelerator()
        # Past DeepSpeedStrategy's, which insists on CUDA.
        DDPStrategy.setup_environment(self)
        destroy_process_group_at_exit()

    def setup_distributed(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_distributed()
            return
        # As DeepSpeedStrategy does, without its check of CUDA device indices.
        _use_gloo_only()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """No deepspeed.zero.Init: the model is built on the meta device and partitioned when the engine starts."""
        yield

    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        if self._overlap_comm is None:
            self.config["zero_optimization"]["overlap_comm"] = self.root_device.type == "cuda"
        # Lightning divides the loss by the accumulation count; with 1 here DeepSpeed does not do it again, and the
        # last micro-batch is announced by before_last_micro_batch.
        self.config["gradient_accumulation_steps"] = 1
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)  # DeepSpeed's own throughput log only
        assert self.lightning_module is not None
        self.config["gradient_clipping"] = self.lightning_module.trainer.gradient_clip_val or 0.0

    def init_deepspeed(self) -> None:
        try:
            super().init_deepspeed()
        except ConfigError:
            raise
        except (AssertionError, ValueError) as error:  # of settings that it does not know, or not together
            raise ConfigError(f"DeepSpeed refuses the settings of zero: {' '.join(str(error).split())}") from error
        zero = self._zero_optimizer()
        if zero is not None:
            deepspeed_muon.link(zero)

    # One optimizer step ---------------------------------------------------------------------------------------------

    @property
    def handles_gradient_accumulation(self) -> bool:
        # With True, Lightning leaves boundaries to DeepSpeed, which never steps on a partial window at an epoch's end.
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        yield
        self.deepspeed_engine.micro_steps += 1  # engine.step(), which counts, is not called for this micro-batch

    def before_last_micro_batch(self) -> None:
        self.deepspeed_engine.set_gradient_accumulation_boundary(True)

    def global_grad_norm(self, optimizer: Optimizer) -> Tensor:
        return deepspeed_state.global_grad_norm(self.deepspeed_engine.optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Nothing: engine.step() clips by the norm. With an offloaded optimizer gradients would be clipped twice."""
        if clip_val > 0 and gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            raise ConfigError("ZeRO clips by norm only; set trainer.gradient_clip_algorithm: norm")

    def discard_gradients(self, optimizer: Optimizer) -> None:
        deepspeed_state.discard_gradients(self.deepspeed_engine)

    def scale_rows(self, items: list[tuple[Tensor, Tensor]]) -> None:
        """Multiply rows of matrices by factors, [rows], that every rank knows, between two steps. Collective."""
        deepspeed_state.scale_rows(self._zero_optimizer(), items)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def collect(self, with_optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        zero = self._zero_optimizer()
        assert self.lightning_module is not None
        if zero is None:
            return deepspeed_state.plain_tensors(self.lightning_module), None
        return deepspeed_state.collect(self.lightning_module, zero, with_optimizer)

    def restore(self, reader: checkpoint_io.Reader, with_optimizer: bool) -> None:
        module, zero = self.lightning_module, self._zero_optimizer()
        assert module is not None
        reader.load({f"buffer/{name}": buffer for name, buffer in state.persistent_buffers(module).items()})
        if not with_optimizer or zero is None:
            deepspeed_state.load_plain(module, reader)
            return
        saved = reader.rest["optimizer"]
        names = deepspeed_state.group_names(module, zero)
        reader.together(lambda: state.check_optimizer(saved, zero.optimizer, names))
        deepspeed_state.load(module, zero, reader)
        report_differences(state.restore_groups(saved, zero.optimizer))
        self.deepspeed_engine.global_steps = self.deepspeed_engine.micro_steps = int(reader.rest["global_step"])

    def _zero_optimizer(self) -> Any | None:
        """The engine's partitioning optimizer; None when the engine only evaluates."""
        optimizer = getattr(self.model, "optimizer", None)
        return optimizer if hasattr(optimizer, "optimizer") else None


class _ZeROPrecision(DeepSpeedPrecision):
    """Leaves inputs alone: DeepSpeed's would round every float in a batch, token counts too, to bf16."""

    def convert_input(self, data: Any) -> Any:
        return data


class _AutocastRedirection(_ForwardRedirection):
    """Runs the LightningModule's step under autocast inside the engine, which turns off what is on outside of it."""

    def __init__(self, strategy: ZeRO) -> None:
        super().__init__()
        self.strategy = strategy

    def __call__(
        self, wrapper_module: nn.Module, original_module: Any, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if self.strategy.precision_plugin.precision != "bf16-mixed":
            return super().__call__(wrapper_module, original_module, method_name, *args, **kwargs)
        method: Callable[..., Any] = getattr(original_module, method_name)

        def under_autocast(*inner_args: Any, **inner_kwargs: Any) -> Any:
            with torch.autocast(self.strategy.root_device.type, dtype=torch.bfloat16, cache_enabled=False):
                return method(*inner_args, **inner_kwargs)

        object.__setattr__(original_module, method_name, under_autocast)
        try:
            return super().__call__(wrapper_module, original_module, method_name, *args, **kwargs)
        finally:
            object.__delattr__(original_module, method_name)


def _use_gloo_only() -> None:
    """Keep DeepSpeed on CPU from compiling its shared-memory collectives when it starts.

    That takes a minute and a C++ compiler, and a killed build leaves a lock that hangs every later run.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _require_cpu_accelerator() -> None:
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        raise ConfigError("ZeRO with trainer.accelerator cpu on a machine with a GPU: set DS_ACCELERATOR=cpu first")
