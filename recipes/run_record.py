"""Writes down what a run is: its config beside it, and its facts in the loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lm.plan import DEFAULT_FLOP_CONVENTION, count_parameters, flops_per_token, n_params
from plugins.loggers.mlflow import MLflowLogger
from recipes.version import git_commit


class RunRecord(SaveConfigCallback):
    """Saves config.yaml in the run's folder and opens the MLflow run, new or continued."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet: model, strategy and checkpoint may still be refused, and must leave no run behind."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        run_dir = Path(trainer.default_root_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        resume = (run_dir / "config.yaml").exists()
        text = self.parser.dump(self.config, skip_none=False)
        aside = run_dir / ".config.yaml.tmp"
        aside.write_text(text)
        aside.rename(run_dir / "config.yaml")
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.open(run_dir, resume=resume)
                logger.log_params(run_facts(trainer, pl_module))
                logger.log_artifact(run_dir / "config.yaml")


def run_facts(trainer: Any, module: Any) -> dict[str, Any]:
    """Parameters of the run under the names that sweeps and fits read."""
    data, config, optim = trainer.datamodule, module.model_config, module.optim_config
    counts = count_parameters(config)
    tokens = data.plan.ramp.tokens(trainer.max_steps)
    per_token = flops_per_token(config, data.sequence_length)
    return {
        "n_params": n_params(config),
        "n_convention": "matmul",
        "n_params_total": counts.total,
        "n_params_non_embedding": counts.non_embedding,
        "d_tokens": tokens,
        "c_flops": per_token * tokens,
        "flops_per_token": per_token,
        "flops_convention": DEFAULT_FLOP_CONVENTION,
        "d_model": config.d_model,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "d_ff": config.d_ff,
        "vocab_size": config.vocab_size,
        "tie_embeddings": config.tie_embeddings,
        "sequence_length": data.sequence_length,
        "global_batch_tokens": data.global_batch_tokens,
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "schedule": optim.schedule.kind,
        "seed": module.seed,
        "strategy": type(trainer.strategy).__name__,
        "world_size": trainer.world_size,
        "precision": trainer.precision,
        "git_commit": git_commit(),
        "torch_version": torch.__version__,
        "data_fingerprint": data.fingerprint()["shards"][:16],
    }
