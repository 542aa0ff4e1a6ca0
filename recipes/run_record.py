"""Writes down what a run is: its config beside it, and its facts in the loggers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lm.data.epochs import format_stages, format_table
from lm.data.flops import flops_until
from lm.data.fragmentation import format_fragmentation
from lm.data.mix import format_rules
from lm.errors import ConfigError
from lm.plan import DEFAULT_FLOP_CONVENTION, count_parameters, n_params
from plugins.callbacks import run_lock
from plugins.loggers.mlflow import MLflowLogger
from recipes.files import write_text
from recipes.version import git_commit


class RunRecord(SaveConfigCallback):
    """Saves config.yaml in the run's folder and opens the MLflow run, new or continued."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet: model, strategy and checkpoint may still be refused, and must leave no run behind."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        problem = self._record(trainer, pl_module) if trainer.is_global_zero else None
        # All ranks stop together: one that left alone would take the others down with a traceback each.
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise ConfigError(problem)

    def _record(self, trainer: Any, pl_module: LightningModule) -> str | None:
        """None, or why there can be no record."""
        run_dir = Path(trainer.default_root_dir)
        known = trainer.known or run_lock.held(run_dir)  # held: Resume took it, and looked at the run after that
        loggers = [logger for logger in trainer.loggers if isinstance(logger, MLflowLogger)]
        try:
            for logger in loggers:
                logger.check(known)  # before there is a folder
            self._lock(run_dir)
            resume = (run_dir / "config.yaml").exists()
            if resume and not known:
                # Two starts at once: neither saw a run. This one would write over it, and begin it a second time.
                raise ConfigError(
                    f"another process began the run in {run_dir} at this moment; --ckpt_path auto goes on from it"
                )
            self._write_config(run_dir)
            for logger in loggers:
                self._open(logger, run_dir, resume)
        except ConfigError as error:
            return str(error)
        for logger in loggers:
            logger.log_params(run_facts(trainer, pl_module))
            logger.log_artifact(run_dir / "config.yaml")
        trainer.known = True
        return None

    def _lock(self, run_dir: Path) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError:
            return  # told by _write_config
        problem = run_lock.hold(run_dir)
        if problem is not None:
            raise ConfigError(problem)

    def _open(self, logger: MLflowLogger, run_dir: Path, resume: bool) -> None:
        try:
            logger.open(run_dir, resume=resume)
        except ConfigError:
            if not resume:
                (run_dir / "config.yaml").unlink(missing_ok=True)  # there is no run
            raise

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the run reads, and keep it: only here all stages are known, also those of a resumed run."""
        if not trainer.is_global_zero:
            return
        text = reading_of(trainer)
        print(text, file=sys.stderr)
        path = Path(trainer.default_root_dir) / "data.txt"
        try:
            path.write_text(text + "\n")
        except OSError as error:  # a full disk is no reason to stop: the run has its config
            print(f"warning: cannot write {path}: {error.strerror}", file=sys.stderr)
            return
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.log_artifact(path)

    def _write_config(self, run_dir: Path) -> None:
        try:
            write_text(run_dir / "config.yaml", self.parser.dump(self.config, skip_none=False))
        except OSError as error:
            raise ConfigError(f"cannot write the folder {run_dir}: {error.strerror}; set another runs_dir") from None


def reading_of(trainer: Any) -> str:
    """Stages, epoch table and fragmentation of a run, as text."""
    data = trainer.datamodule
    total = data.plan.ramp.tokens(trainer.max_steps)
    stages = "\n".join(filter(None, (format_stages(data.plan, total), format_rules(data.mixes))))
    fragmentation = format_fragmentation(data.packing, data.fragmentation())
    return "\n\n".join((stages, format_table(data.epoch_table(total)), fragmentation))


def run_facts(trainer: Any, module: Any) -> dict[str, Any]:
    """Parameters of the run under the names that sweeps and fits read."""
    data, config, optim = trainer.datamodule, module.model_config, module.optim_config
    counts = count_parameters(config)
    tokens = data.tokens_trained(trainer.max_steps)
    rows = data.fragmentation()
    flops = flops_until(config, data.plan, trainer.max_steps)
    return {
        "n_params": n_params(config),
        "n_convention": "matmul",
        "n_params_total": counts.total,
        "n_params_non_embedding": counts.non_embedding,
        "d_tokens": tokens,
        "c_flops": flops,
        "flops_per_token": flops // tokens if flops % tokens == 0 else flops / tokens,  # the run's mean
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
        "packing": data.packing,
        "documents_cut": sum(row.cut for row in rows) / max(1, sum(row.documents for row in rows)),
        "padding": 1 - tokens / data.plan.ramp.tokens(trainer.max_steps),  # FLOPs count it, tokens do not
        "lr": optim.lr,
        "weight_decay": optim.weight_decay,
        "schedule": optim.schedule.kind,
        "seed": module.seed,
        "strategy": type(trainer.strategy).__name__,
        "world_size": trainer.world_size,
        "precision": getattr(trainer.precision_plugin, "label", trainer.precision),
        "compile": module.runtime.compile is True,
        "precision_choice": getattr(trainer, "choice", "") or "given",
        "git_commit": git_commit(),
        "torch_version": torch.__version__,
        "data_fingerprint": data.fingerprint()["shards"][:16],
        **({"mix": json.dumps([one.plain() for one in data.mixes])} if data.mixes else {}),
    }
