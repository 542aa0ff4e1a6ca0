"""Turns a config into (trainer, module, data), for the command line and for sweeps alike."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from jsonargparse import DefaultHelpFormatter
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

import conf
import plugins.strategies
from lm.config import model_config_from
from lm.data.ramp import BatchRamp
from lm.datamodule import TokenDataModule
from lm.errors import ConfigError
from lm.module import LlamaModule
from lm.plan import training_flops
from plugins.strategies.checkpoint import candidates
from plugins.strategies.ports import choose_port
from recipes.checks import check_seed, check_values, count_devices, is_child_rank, set_max_steps
from recipes.class_paths import check_class, restrict, said_by_class, shorten
from recipes.command import split_help
from recipes.from_hf import config_defaults
from recipes.repeated_keys import refuse_repeated_keys
from recipes.run_record import RunRecord
from recipes.trainer import RecipeTrainer, check_precision, device_of, settle

_DEFAULTS = str(Path(conf.__file__).parent / "trainer" / "default.yaml")
_SUBCOMMANDS = {
    "fit": "Train a run, from its beginning or (--ckpt_path) from a checkpoint.",
    "validate": "Loss and bits per byte of a checkpoint on the held-out windows.",
    "test": "The same as validate.",
}

# What the recipe relies on and no config should change.
_FIXED = {
    "max_epochs": -1,  # the length of a run is its tokens
    "check_val_every_n_epoch": None,  # validation is counted in steps
    "use_distributed_sampler": False,  # the data order shards itself
    "enable_model_summary": False,
    "enable_progress_bar": True,
}


class Parts(NamedTuple):
    """What a config describes."""

    trainer: Trainer
    module: LlamaModule
    data: TokenDataModule


class OneLineParser(LightningArgumentParser):
    """Says what is wrong in one line, without pages of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(
            f"{shorten(' '.join(message.split()))}; for the options run: python -m recipes.pretrain fit --help"
        )


class Help(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """jsonargparse's, with examples a line each."""


class PretrainCLI(LightningCLI):
    """LightningCLI with the recipe's defaults, owners of shared values, and run folders.

    Args:
        help_text: what --help says before and behind the subcommands, see recipes.command.split_help.
    """

    def __init__(self, args: Any = None, run: bool = True, help_text: str = ""):
        plugins.strategies.register()
        restrict()
        refuse_repeated_keys()
        self.newest_of: Path | None = None  # folder of checkpoints whose newest sound one is continued
        self.known = False  # whether the run was there when this process looked, which was without a lock
        self._config_defaults = config_defaults(args)
        defaults: dict[str, Any] = {
            "default_config_files": [_DEFAULTS],
            "parser_mode": "omegaconf+",
        }
        words: dict[str, Any] = {
            "prog": "python -m recipes.pretrain", **split_help(help_text), "formatter_class": Help,
        }  # fmt: skip
        subcommands = {name: {**defaults, "description": _SUBCOMMANDS[name]} for name in self.subcommands()}
        super().__init__(
            LlamaModule,
            TokenDataModule,
            save_config_callback=RunRecord,
            trainer_class=RecipeTrainer,
            parser_class=OneLineParser,
            trainer_defaults=dict(_FIXED),
            seed_everything_default=0,
            parser_kwargs={**words, **subcommands} if run else defaults,
            args=args,
            run=run,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The one that the command line names, else all: the parsers of the others take as long to build."""
        names = set(sys.argv[1:2]) & _SUBCOMMANDS.keys() or _SUBCOMMANDS
        return {name: skip for name, skip in LightningCLI.subcommands().items() if name in names}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--name", type=str, default="run", help="Name of the run: its folder is runs_dir/name.")
        parser.add_argument("--runs_dir", type=str, default="runs", help="Folder of all runs.")
        parser.add_argument("--tokens", type=float, default=0, help="Training tokens; sets trainer.max_steps.")
        parser.add_argument(
            "--from_hf", "--from-hf", type=str | None, help="Hugging Face folder to take model.config and weights from."
        )
        parser.link_arguments(("runs_dir", "name"), "trainer.default_root_dir", compute_fn=_run_dir)
        parser.link_arguments("from_hf", "model.from_hf")
        parser.set_defaults(self._config_defaults)

    def _parse_ckpt_path(self) -> None:
        """Lightning would put the checkpoint's hyperparameters back over YAML and command line; the config owns."""

    def _set_seed(self) -> None:
        config = self.config[self.config.subcommand] if self.config.get("subcommand") else self.config
        check_seed(config.seed_everything)
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        config = self.config[self.config.subcommand] if self.config.get("subcommand") else self.config
        check_values(config)
        config.trainer.strategy = default_strategy(config.trainer)
        check_names(config.trainer)
        if config.tokens > 0:  # no link: a link's source must be known before the config files are read
            set_max_steps(config, steps_for(config.tokens, config.data))
        self._settle_runtime(config)
        run_dir = Path(config.trainer.default_root_dir)
        self.known = (run_dir / "config.yaml").exists()
        if not self.config.get("subcommand"):
            return
        if config.trainer.strategy != "single":
            choose_port()
        check_processes(config.trainer)
        if config.get("ckpt_path") is not None:
            self.newest_of = newest_of(config.ckpt_path, run_dir)
            if self.newest_of is not None:
                config.ckpt_path = None  # all ranks choose one together, when they can talk to each other
            if self.newest_of is None or candidates(self.newest_of):
                config.model.from_hf = None  # the checkpoint replaces those weights; the folder may be gone
        elif self.config.subcommand == "fit" and not is_child_rank() and self.known:
            raise ConfigError(
                f"{run_dir} already holds a run: continue it with --ckpt_path last, or choose another --name"
            )

    def _settle_runtime(self, config: Any) -> None:
        """Put the choice in place of 'auto', so that the run's config.yaml says what was used; say so once."""
        shape = model_config_from(config.model.config.as_dict())
        trained = config.tokens if self.config.get("subcommand") in (None, "fit") else 0.0
        flops = training_flops(shape, max(trained, 0.0), config.data.sequence_length)
        trainer, runtime = config.trainer, config.model.runtime
        if runtime.compile == "auto" and _tensor_parallel(trainer.strategy) > 1:
            runtime.compile = False  # see plugins.strategies.tensor_parallel
        trainer.precision, runtime.compile, self.choice = settle(
            trainer.precision, runtime.compile, shape, flops, device_of(trainer.accelerator)
        )
        if self.choice and self.config.get("subcommand") and not is_child_rank():
            print(self.choice, file=sys.stderr)

    def instantiate_classes(self) -> None:
        """As of LightningCLI. What a class says of its own arguments is passed on as it said it: jsonargparse takes a
        ValueError for a value that is none of the types it tries, and wraps it."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if isinstance(error, ConfigError) or (reason := said_by_class(str(error))) is None:
                raise
            raise ConfigError(reason) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer: Any = super().instantiate_trainer(**kwargs)
        trainer.choice = self.choice
        trainer.resume.folder = self.newest_of
        trainer.known = self.known
        return trainer


def _tensor_parallel(strategy: Any) -> int:
    """Of a strategy in a config: a name, a class with arguments, or an object."""
    arguments = getattr(strategy, "init_args", None)
    return int(getattr(strategy if arguments is None else arguments, "tensor_parallel", 1))


def _run_dir(runs_dir: str, name: str) -> str:
    return str(Path(runs_dir) / name)


def steps_for(tokens: float, data: Any) -> int:
    """Optimizer steps that see `tokens` tokens under data's batch_ramp, to the nearest step, at least 1."""
    return BatchRamp(data.batch_ramp or [(0, data.global_batch_tokens)]).nearest_step(tokens)


def newest_of(ckpt_path: str, run_dir: Path) -> Path | None:
    """The folder whose newest sound checkpoint --ckpt_path means, or None where it names a checkpoint itself.

    'last' continues a run, from its beginning where it was cut off before its first checkpoint; 'auto' starts one too.

    Raises:
        ConfigError: no such checkpoint or run.
    """
    if ckpt_path not in ("last", "auto"):
        if not Path(ckpt_path).exists():
            raise ConfigError(f"--ckpt_path {ckpt_path}: no such checkpoint; 'last' takes the run's newest")
        return None
    if ckpt_path == "last" and not (run_dir / "config.yaml").exists():
        raise ConfigError(
            f"--ckpt_path last: there is no run in {run_dir} to continue; leave it out to start one, or take auto, "
            "which does either"
        )
    return run_dir / "checkpoints"


def check_processes(trainer: Any) -> None:
    """Refuse a launcher's processes that the trainer would not join.

    Raises:
        ConfigError: torchrun started another number of processes than trainer.devices x trainer.num_nodes.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return
    processes, count = int(os.environ["WORLD_SIZE"]), count_devices(trainer.devices)
    if count is not None and count * int(trainer.num_nodes) != processes:
        raise ConfigError(
            f"torchrun started {processes} processes, trainer.devices x trainer.num_nodes is "
            f"{count * int(trainer.num_nodes)}; set them to what --nproc-per-node and --nnodes are"
        )


def check_names(trainer: Any) -> None:
    """Refuse a strategy or precision that Lightning would replace or reject in many lines.

    Raises:
        ConfigError: unknown strategy name, or a precision that the strategies do not have.
    """
    for key, base in (("strategy", Strategy), ("profiler", Profiler)):
        check_class(f"trainer.{key}", trainer.get(key), base)
    if isinstance(trainer.strategy, str) and trainer.strategy not in plugins.strategies.NAMES:
        raise ConfigError(
            f"trainer.strategy {trainer.strategy} is unknown; take one of {', '.join(plugins.strategies.NAMES)},"
            " or a class_path"
        )
    check_precision(trainer.precision)


def default_strategy(trainer: Any) -> Any:
    """The strategy that trainer.strategy 'auto' means: single for one process, ddp for several."""
    if trainer.strategy != "auto":
        return trainer.strategy
    count = count_devices(trainer.devices)
    if count is None:
        cuda = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        count = torch.cuda.device_count() if cuda else 1
    return "single" if count * int(trainer.num_nodes) == 1 else "ddp"


def build(config: dict[str, Any]) -> Parts:
    """Trainer, module and data from a config of the same form as the YAML files.

    Raises:
        ConfigError, SystemExit: the config does not parse.
    """
    cli = parse(config)
    return Parts(cli.trainer, cli.model, cli.datamodule)


def parse(arguments: dict[str, Any] | list[str]) -> PretrainCLI:
    """The parts of a run, built and not run, from a config or from the arguments of `recipes.pretrain fit`."""
    return PretrainCLI(args=arguments, run=False)
