"""The LightningModule: model, objective, optimizer and schedule of one pretraining run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lm.attention import check_backend
from lm.config import ModelConfig, RuntimeConfig
from lm.errors import ConfigError
from lm.init import WeightSource, materialize
from lm.loss import IGNORE
from lm.metrics import metrics_of_sets
from lm.model import Llama
from lm.optim.build import make_optimizer
from lm.optim.config import OptimConfig
from lm.optim.schedule import lr_multiplier
from lm.rope_stages import RopeChange, config_at

# A checkpoint may be continued with other values of these (long-context stages change the RoPE base).
_FREE_ON_RESUME = frozenset(
    {"rope_theta", "rope_scaling", "norm_eps", "init_std", "embedding_init_std", "depth_scaled_init", "zero_init_head"}
    | {"attention_softcap", "final_softcap"}
)


class LlamaModule(LightningModule):
    """Trains a Llama on packed windows.

    The loss of a step is the mean over all labelled tokens of the global batch: each micro-batch divides its sum by
    `loss_tokens`, the global count over (ranks x accumulation), so that the mean taken by the strategy and by
    accumulation is exact however the batch is split.

    Args:
        config: shape of the model.
        optim: optimizer and schedule; the schedule spans trainer.max_steps.
        seed: of the initial values, which do not depend on strategy or world size.
        runtime: how the model is computed: attention backend, compilation, activation checkpointing.
        z_loss: weight of logsumexp(logits)^2 in the objective, which keeps logits from drifting (Chowdhery et al.
            2022, arXiv 2204.02311, sec. 5; there 1e-4). Reported losses do not contain it.
        from_hf: Hugging Face folder whose weights the run starts from; null: random ones.

    Attributes:
        step_loss: of the step under way, without z-loss: the mean over this rank's micro-batches so far divided by
            their number in a step. Its mean over the ranks is the loss of the global batch once the step is whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        optim: OptimConfig = OptimConfig(),
        seed: int = 0,
        runtime: RuntimeConfig = RuntimeConfig(),
        z_loss: float = 0.0,
        from_hf: str | None = None,
    ):
        super().__init__()
        if z_loss < 0:
            raise ConfigError(f"model.z_loss must not be negative, got {z_loss}")
        self.runtime = runtime
        self.z_loss = z_loss
        self.from_hf = from_hf
        self.model_config = config
        self.optim_config = optim
        self.schedule = optim.schedule  # a cooldown learns from its checkpoint where it starts
        self.rope_changes: list[RopeChange] = []  # set by a callback in its setup hook
        self.checkpoint_step = 0  # of the checkpoint that was loaded
        self.seed = seed
        self.model: Any = None  # Llama, once configure_model has built it
        self.metrics: dict[str, float] = {}
        self.step_loss: Tensor | float = 0.0
        self._validation_sums: Tensor = torch.zeros(0)

    def setup(self, stage: str) -> None:
        # Lightning counts validation in micro-batches; here an interval is in optimizer steps.
        interval = self.trainer.val_check_interval
        if stage == "fit" and isinstance(interval, int):
            self.trainer.val_check_interval = interval * self.trainer.accumulate_grad_batches

    def configure_model(self) -> None:
        """Build on the meta device, let the strategy shard, then fill in initial values. Safe to call again."""
        if self.model is not None:
            return
        source = self._weights()
        with torch.device("meta"):
            model = Llama(self.model_config, self.runtime)
        strategy = self.trainer.strategy
        check_backend(self.runtime.attention, strategy.root_device.type)
        convert = getattr(strategy.precision_plugin, "convert_model", None)
        if convert is not None:
            convert(model, strategy.root_device)  # FP8 layers have to be there before blocks are compiled and sharded
        if self.runtime.compile is True:
            for block in model.blocks:
                block.compile()  # one graph serves all blocks
        parallelize = getattr(strategy, "parallelize", None)
        if parallelize is not None:
            parallelize(model)
        device = getattr(strategy, "parameter_device", strategy.root_device)
        materialize(model, self.model_config, self.seed, device, source)
        self.model = model

    def _weights(self) -> WeightSource | None:
        """Where initial values come from; None for random ones."""
        if self.from_hf is None:
            return None
        from lm.hf_weights import HFWeights

        return HFWeights(self.from_hf, self.model_config)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """See lm.optim.build. The rate is set before each step, from the step alone."""
        if self.trainer.max_steps <= 0:
            raise ConfigError("the run has no length: set tokens (or trainer.max_steps)")
        return make_optimizer(self.model, self.model_config, self.optim_config)

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step`, before the groups' multipliers."""
        return self.optim_config.lr * lr_multiplier(step, self.trainer.max_steps, self.schedule)

    def on_train_start(self) -> None:
        self.lr(self.trainer.global_step)  # a cooldown without a checkpoint stops here, in one line

    def on_train_batch_start(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        # No scheduler object: its saved base rates would silently win over a changed config on resume.
        multiplier = lr_multiplier(self.trainer.global_step, self.trainer.max_steps, self.schedule)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["peak_lr"] * multiplier
        self._set_rope(self.trainer.global_step)

    def config_at(self, step: int) -> ModelConfig:
        """The model's config with the RoPE of 0-based step `step`."""
        if not self.rope_changes:
            return self.model_config
        trainer: Any = self.trainer
        return config_at(self.model_config, self.rope_changes, trainer.datamodule.plan.ramp, step)

    def _set_rope(self, step: int) -> None:
        config = self.config_at(step)
        self.model.rope = config.rope_theta, config.rope_scaling

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        labels = batch["labels"]
        nll, logsumexp = self.model(batch["input_ids"], batch["document_ids"], labels, with_logsumexp=True)
        loss = nll.sum() / batch["loss_tokens"]
        self.step_loss = self.step_loss + loss.detach() / self.trainer.accumulate_grad_batches
        if self.z_loss > 0:
            loss = loss + self.z_loss * (logsumexp.square() * (labels != IGNORE)).sum() / batch["loss_tokens"]
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Mapping[str, Any], batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches != 0:
            return
        step_loss, self.step_loss = self.step_loss, 0.0
        step = self.trainer.global_step  # steps done, this one included
        if step == self.trainer.max_steps:
            self.trainer.val_check_batch = self.trainer.fit_loop.total_batch_idx + 1  # always validate at the end
        trainer: Any = self.trainer
        if step % trainer.log_every_n_steps != 0 and step != self.trainer.max_steps:
            return
        values = {"loss": float(self.trainer.strategy.reduce(step_loss, reduce_op="mean")), "lr": self.lr(step - 1)}
        grad_norm = getattr(self.trainer.strategy, "grad_norm", None)
        if grad_norm is not None:
            values["grad_norm"] = float(grad_norm)
        self.record(values)

    def on_validation_epoch_start(self) -> None:
        trainer: Any = self.trainer
        self._set_rope(max(trainer.global_step or self.checkpoint_step, 1) - 1)  # as the last step was trained
        sets = len(trainer.datamodule.validation_sets)
        # nats, labelled tokens and their bytes per loader; fp64 because counts pass 2^24
        device = trainer.strategy.root_device  # self.device is where parameters are kept: CPU when they are offloaded
        self._validation_sums = torch.zeros(sets, 3, dtype=torch.float64, device=device)

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        nll = self.model(batch["input_ids"], batch["document_ids"], batch["labels"])
        sums = self._validation_sums[dataloader_idx]
        sums[0] += nll.sum(dtype=torch.float64)
        sums[1] += (batch["labels"] >= 0).sum()
        sums[2] += batch["target_bytes"].sum()

    def on_validation_epoch_end(self) -> None:
        trainer: Any = self.trainer
        sums = trainer.strategy.reduce(self._validation_sums, reduce_op="sum").tolist()
        data = trainer.datamodule
        values = metrics_of_sets(data.validation_sets, data.source_weights, sums)
        if not self.trainer.sanity_checking:
            self.record(values)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Tensor:
        """Logits [B, V] of the token that follows position batch["at"], [B], of each window.

        With batch["labels"], [B, T], the loss of each position instead, [B, T] in nats.
        """
        out: Tensor = self.model(
            batch["input_ids"], batch.get("document_ids"), labels=batch.get("labels"), at=batch.get("at")
        )
        return out

    test_step = validation_step
    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def record(self, values: dict[str, float]) -> None:
        """Send metrics to the loggers, at the number of steps done, and keep the newest of each in `metrics`."""
        self.metrics.update(values)
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # With the RoPE of the last step: an export needs the one that the weights were trained with.
        config = self.config_at(max(self.trainer.global_step, 1) - 1)
        checkpoint["model_config"] = dataclasses.asdict(config)
        last_lr = self.lr(max(self.trainer.global_step - 1, 0))
        checkpoint["schedule"] = {**dataclasses.asdict(self.schedule), "last_lr": last_lr}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved, here = checkpoint.get("model_config", {}), dataclasses.asdict(self.model_config)
        for name, value in saved.items():
            if name in here and here[name] != value and name not in _FREE_ON_RESUME:
                raise ConfigError(
                    f"the checkpoint was trained with model.config.{name} = {value}, this run has {here[name]}; "
                    "set it to the checkpoint's value or start a new run"
                )
        self.checkpoint_step = int(checkpoint.get("global_step", 0))
        self._note_other_rope(saved)
        if self.schedule.kind == "cooldown":
            self._start_cooldown(checkpoint)

    def _note_other_rope(self, saved: Mapping[str, Any]) -> None:
        """This run's config decides, but a stage that it lacks or moved should not go unnoticed."""
        here = dataclasses.asdict(self.config_at(max(self.checkpoint_step, 1) - 1))
        for name in ("rope_theta", "rope_scaling"):
            if saved.get(name, here[name]) != here[name]:
                rank_zero_warn(
                    f"the checkpoint was trained with {name} {saved[name]}, this run has {here[name]} there; if that is"
                    " not meant, give it the same model.config and the same long-context stages"
                )

    def _start_cooldown(self, checkpoint: Mapping[str, Any]) -> None:
        """At the checkpoint's step and rate, or, where it was saved in a cooldown, as that one began."""
        saved = checkpoint.get("schedule", {})
        if "last_lr" not in saved:
            raise ConfigError("the checkpoint does not say its learning rate; a cooldown needs one of a newer version")
        step, share = int(checkpoint["global_step"]), saved["last_lr"] / self.optim_config.lr
        if saved["kind"] == "cooldown":
            step, share = saved["cooldown_from_step"], saved["cooldown_from"]
        self.schedule = dataclasses.replace(self.schedule, cooldown_from_step=step, cooldown_from=share)
