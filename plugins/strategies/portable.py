"""What all strategies share: one checkpoint format, the gradient norm, skipped steps, clipping.

    class DDP(Portable, DDPStrategy): ...

Lightning's own checkpoint files belong to a strategy and a world size; these folders do not (docs/strategies.md).
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lm.errors import ConfigError, RunStopped
from plugins.strategies import agreement, checkpoint, checkpoint_io, context_parallel, gradients, state
from plugins.strategies.background import BackgroundSaver, InBackground
from plugins.strategies.checkpoint import CheckpointError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy as _Base
else:
    _Base = object

Guard = Callable[[float, float], bool]

PRECISIONS = ("32-true", "bf16-mixed")

MAX_SKIPPED_IN_A_ROW = 100


class Portable(_Base):
    """Mixin before a Lightning strategy.

    Attributes:
        grad_norm: global norm of the last step's gradients before clipping, 0-dimensional fp32, equal on all ranks;
            None before the first step.
        guards: asked before each optimizer step with (global gradient norm, loss of the global batch), both of the
            whole step and the same numbers on all ranks; either may be NaN or infinite. True skips the step. Every
            rank must hold the same guards, and a guard must decide from what is the same on all ranks.
        skipped_steps: steps skipped since the start of this process.
        skipped: whether the last step was skipped.
        saver: writes the checkpoints that are saved with storage_options=InBackground().
        tensor_parallel: neighbouring ranks that cut each matrix between them.
        context_parallel: neighbouring groups of those that cut each window between them.
    """

    tensor_parallel: int = 1
    context_parallel: int = 1

    grad_norm: Tensor | None
    guards: list[Guard]
    skipped_steps: int
    skipped: bool
    saver: BackgroundSaver

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grad_norm = None
        self.guards = []
        self.skipped_steps = 0
        self.skipped = False
        self._skipped_in_a_row = 0
        self.saver = BackgroundSaver()

    # Data -----------------------------------------------------------------------------------------------------------

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(which part of a batch this rank takes, number of parts). Ranks that share windows take the same part."""
        return context_parallel.data_part(self)

    @property
    def head_part(self) -> tuple[int, int]:
        """(which part of each layer's query heads attention computes on this rank, number of parts)."""
        return context_parallel.head_part(self)

    # Model ----------------------------------------------------------------------------------------------------------

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters are kept between steps."""
        return self.root_device

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Shard a model that is still on the meta device, before its values are filled in. Here: leave it whole."""
        context_parallel.share_windows(model, self)
        return model

    def setup_environment(self) -> None:
        super().setup_environment()
        destroy_process_group_at_exit()

    def setup(self, trainer: Trainer) -> None:
        precision = self.precision_plugin.precision
        if precision not in PRECISIONS:
            raise ConfigError(
                f"trainer.precision {precision} is not supported by {type(self).__name__}; "
                f"use {' or '.join(PRECISIONS)} (weights and optimizer state stay fp32)"
            )
        context_parallel.check_windows(trainer, self.context_parallel)
        super().setup(trainer)

    # One optimizer step ---------------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward, norm, guards; then clip and update, or drop the gradients and leave all as it was.

        A skipped step changes no weight, no moment and no step count of the optimizer. Lightning still counts it in
        trainer.global_step: the schedule and the data move on.

        Raises:
            RunStopped: on all ranks; MAX_SKIPPED_IN_A_ROW steps were skipped one after the other.
        """
        self.before_last_micro_batch()
        result = closure()
        self.grad_norm = self.global_grad_norm(optimizer)
        self.skipped = self._must_skip(self.grad_norm, result)
        if self.skipped:
            self.discard_gradients(optimizer)
            self._count_skip()
            return result
        self._skipped_in_a_row = 0
        return super().optimizer_step(optimizer, lambda: result, model, **kwargs)

    def before_last_micro_batch(self) -> None:
        """Called before the backward pass whose gradients the optimizer will use."""

    def global_grad_norm(self, optimizer: Optimizer) -> Tensor:
        """See gradients.global_norm. Collective."""
        return gradients.global_norm(gradients.optimized_parameters(optimizer))

    def discard_gradients(self, optimizer: Optimizer) -> None:
        """Forget the accumulated gradients as if their micro-batches had never been."""
        optimizer.zero_grad(set_to_none=True)

    def _must_skip(self, norm: Tensor, result: Any) -> bool:
        if not self.guards:
            finite = bool(torch.isfinite(norm))
            if not finite:
                rank_zero_warn(f"skipped an optimizer step: gradient norm {float(norm)}")
            return not finite
        # An offloaded optimizer's norm is on the CPU, and NCCL exchanges only what is on the device.
        norm_value, loss_value = agreement.agree(norm.to(self.root_device), self._step_loss(result))
        decisions = [guard(norm_value, loss_value) for guard in self.guards]  # all of them: guards keep statistics
        return any(decisions) or not math.isfinite(norm_value)

    def _step_loss(self, result: Any) -> Any:
        """This rank's part of the step's loss: the module's step_loss, else the objective of the last micro-batch."""
        loss = getattr(self._module(), "step_loss", None)
        return result if loss is None else loss

    def _count_skip(self) -> None:
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            assert self.grad_norm is not None
            raise RunStopped(
                f"{self._skipped_in_a_row} optimizer steps in a row were skipped, up to step"
                f" {self._module().trainer.global_step + 1} (gradient norm {float(self.grad_norm):.4g}): the run learns"
                " nothing any more; go back to an older checkpoint and lower optim.lr, or look at the data"
            )

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # Where Lightning would compute the norm a second time (or cannot: DTensors), clip by the one already known.
        self.precision_plugin.clip_gradients = self.clip_gradients  # type: ignore[method-assign]

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """What LightningModule.clip_gradients ends in: trainer.gradient_clip_val by the norm of optimizer_step."""
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            Precision.clip_grad_by_value(self.precision_plugin, optimizer, clip_val)
            return
        assert self.grad_norm is not None
        gradients.clip_to_norm(gradients.optimized_parameters(optimizer), clip_val, self.grad_norm)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # tensors are collected in save_checkpoint

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: load_checkpoint has done it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: load_checkpoint has done it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the folder `filepath` (see checkpoint.py). Collective; complete or absent when it returns or raises.

        Args:
            storage_options: None, or InBackground: then it returns as soon as the state is copied, failures are
                reported instead of raised, and the next save or load, or the end of training, waits.

        Raises:
            CheckpointError: on all ranks, when any rank failed.
        """
        if storage_options is not None and not isinstance(storage_options, InBackground):
            raise CheckpointError("storage_options are not supported: checkpoints are folders on a shared file system")
        self.saver.wait()
        with_optimizer = "optimizer_states" in checkpoint
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        tensors, optimizer = self.collect(with_optimizer)
        if optimizer is not None:
            rest["optimizer"] = optimizer
        step = int(checkpoint.get("global_step", 0))
        if isinstance(storage_options, InBackground):
            self.saver.start(tensors, rest, Path(filepath), step, storage_options)
        else:
            checkpoint_io.save(tensors, rest, Path(filepath), step)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the tensors of a checkpoint into model and optimizer and return the rest for Lightning. Collective.

        Raises:
            CheckpointError: on all ranks; the checkpoint is incomplete, damaged, or of another model or optimizer.
        """
        self.saver.wait()
        checkpoint_path = self.broadcast(checkpoint_path)
        reader = checkpoint_io.Reader(Path(checkpoint_path))
        module = self._module()
        reader.together(lambda: state.check_model(module, reader.metadata, module.strict_loading))
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if fitting and "optimizer" not in reader.rest:
            raise CheckpointError(f"{checkpoint_path} holds weights only, without the optimizer's state")
        self.restore(reader, fitting)
        return {"state_dict": {}, **reader.rest}

    def teardown(self) -> None:
        self.saver.wait()  # also after an exception
        super().teardown()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            checkpoint.remove(Path(filepath))

    def collect(self, with_optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """(tensors by key, the optimizer's other state) as this rank holds them. Collective."""
        module = self._module()
        tensors = state.model_tensors(module)
        if not with_optimizer or not self.optimizers:
            return tensors, None
        (optimizer,) = self.optimizers
        moments, scalars = state.optimizer_tensors(module, optimizer)
        return tensors | moments, state.describe_optimizer(state.group_names(module, optimizer), optimizer, scalars)

    def restore(self, reader: checkpoint_io.Reader, with_optimizer: bool) -> None:
        """Copy a checkpoint's tensors into this rank's part of model and optimizer. Collective."""
        module = self._module()
        tensors = state.model_tensors(module)
        if with_optimizer:
            (optimizer,) = self.optimizers
            saved = reader.rest["optimizer"]
            reader.together(lambda: state.check_optimizer(saved, optimizer, state.group_names(module, optimizer)))
            tensors |= state.empty_optimizer_state(module, optimizer, reader.metadata, saved["scalars"])
            report_differences(state.restore_groups(saved, optimizer))
        reader.load(tensors)

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def report_differences(differences: list[str]) -> None:
    """Say which optimizer settings changed between the checkpoint and this run; the run's hold."""
    for line in differences:
        rank_zero_info(f"resume: optimizer {line}; this run's value is used")


def destroy_process_group_at_exit() -> None:
    """Close the process group before the interpreter goes down.

    Lightning does it for NCCL only. A precaution: a process was seen to abort now and then after all work was done
    ("terminate called without an active exception"), and a gloo group with live threads is the suspect, unproven.
    """
    atexit.unregister(_destroy_process_group)
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
