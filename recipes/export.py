"""Write a checkpoint as a Hugging Face model folder: config.json, safetensors, tokenizer.

Takes a checkpoint of any strategy and number of processes. Tensors go through memory one at a time. The folder is
whole or absent, and loads with AutoModelForCausalLM and AutoTokenizer; python -m recipes.pretrain fit --from-hf DIR
starts a run from it.

Examples:
    python -m recipes.export --ckpt_path runs/small/checkpoints/step-00000977 --out exported/small
    python -m recipes.export --ckpt_path runs/small --out exported/small --dtype bfloat16
    python -m recipes.export --ckpt_path runs/small --out exported/small --tokenizer data/demo
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status

if TYPE_CHECKING:
    from torch import Tensor

    from lm.config import ModelConfig
    from plugins.strategies.checkpoint_io import Reader

MODEL_PREFIX = "param/model."  # how the LightningModule's checkpoint names the model's parameters
_DATA = "TokenDataModule"  # where Lightning keeps the data's state


def export(
    ckpt_path: Path,
    out: Path,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: Path | None = None,
    max_position: int | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the folder `out`.

    Args:
        ckpt_path: a checkpoint, or a run's folder, which means its newest.
        dtype: float32 or bfloat16.
        max_shard_bytes: size from which weights are cut into several files.
        tokenizer: tokenizer.json, or a data folder with one; None: the data folder in the run's config.yaml.
        max_position: max_position_embeddings; None: the longest sequence trained on.

    Raises:
        ConfigError: `out` exists, the checkpoint is none or damaged, the model has what Hugging Face's Llama has not,
            or the tokenizer is not the model's.
    """
    from lm.data.files import write_bytes, write_json
    from lm.data.tokenizer import END_OF_TEXT
    from lm.hf import check_exportable, to_hf_config
    from lm.hf_weights import DTYPES, write_weights

    if out.exists():
        raise ConfigError(f"--out {out} exists already; choose another folder or remove it")
    if max_shard_bytes <= 0:
        raise ConfigError(f"--max-shard-bytes must be positive, got {max_shard_bytes}")
    reader = open_checkpoint(ckpt_path)
    config = config_of(reader)
    check_exportable(config)
    text, eos = find_tokenizer(tokenizer, reader, config)
    max_position = max_position or trained_length(reader.rest)
    shapes, read = tensors(reader, config)
    log(f"exporting {reader.path} to {out} as {dtype}")
    with folder_aside(out) as folder:
        values = to_hf_config(config, max_position, eos, dtype)
        write_json(folder / "config.json", values)
        write_json(folder / "generation_config.json", {"eos_token_id": eos})
        write_bytes(folder / "tokenizer.json", text)
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_OF_TEXT,
                # As in training: a text cannot spell end-of-text.
                "split_special_tokens": True,
                "clean_up_tokenization_spaces": False,
                "model_max_length": values["max_position_embeddings"],
            },
        )
        write_weights(folder, shapes, read, DTYPES[dtype], max_shard_bytes, log)


def open_checkpoint(path: Path) -> Reader:
    """A verified checkpoint from its folder, or the newest from its run's folder.

    Raises:
        ConfigError: there is none, or it is torn or damaged.
    """
    from plugins.strategies.checkpoint import latest
    from plugins.strategies.checkpoint_io import Reader

    if (path / "checkpoints").is_dir():
        found = latest(path / "checkpoints")
        if found is None:
            raise ConfigError(f"--ckpt_path {path}: the run has no complete checkpoint yet")
        path = found
    return Reader(path)


def config_of(reader: Reader) -> ModelConfig:
    """Of the model that a checkpoint holds.

    Raises:
        ConfigError: it does not say.
    """
    from lm.config import model_config_from

    if "model_config" not in reader.rest:
        raise ConfigError(f"{reader.path} does not say which model it holds; it was not written by recipes.pretrain")
    return model_config_from(reader.rest["model_config"])


def tensors(reader: Reader, config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    """(shapes by Hugging Face's names, function that reads one tensor as Hugging Face wants it).

    Raises:
        ConfigError: the checkpoint does not hold the model of its own config.
    """
    import torch

    from lm.hf import export_factor, hf_name, parameter_shapes

    ours = parameter_shapes(config)
    names = {hf_name(name): name for name in ours}
    saved = reader.metadata.state_dict_metadata
    for name, shape in ours.items():
        entry: Any = saved.get(MODEL_PREFIX + name)
        if entry is None or tuple(entry.size) != shape:
            raise ConfigError(f"{reader.path} has no {name} of shape {shape}, which its own model config asks for")

    def read(theirs: str) -> Tensor:
        name = names[theirs]
        entry: Any = saved[MODEL_PREFIX + name]
        tensor = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        reader.load({MODEL_PREFIX + name: tensor})
        factor = export_factor(name, config)
        return tensor if factor == 1.0 else tensor.mul_(factor)

    return {hf_name(name): shape for name, shape in ours.items()}, read


def trained_length(rest: Mapping[str, Any]) -> int:
    """Longest sequence length, in tokens, of the stages that training has reached; 2048 where nothing is known."""
    state = rest.get(_DATA)
    if state is None:
        return 2048
    from lm.data.resume import plan_from

    plan = plan_from(state["fingerprint"]["plan"])
    reached = plan.stages[: plan.stage_of_step(max(int(state["step"]), 1) - 1) + 1]
    return max(stage.sequence_length for stage in reached)


def find_tokenizer(given: Path | None, reader: Reader, config: ModelConfig) -> tuple[bytes, int]:
    """(bytes of the tokenizer.json that the model was trained with, id of its end-of-text).

    Raises:
        ConfigError: there is none, or it is another one.
    """
    import hashlib

    from lm.data.tokenizer import end_of_text_id, load_tokenizer

    path = data_folder(reader.path.resolve().parent.parent) if given is None else given
    if path is None:
        raise ConfigError(f"no config.yaml of a run above {reader.path} names the data; pass --tokenizer DIR_OR_FILE")
    tokenizer = load_tokenizer(path)
    text = (path / "tokenizer.json" if path.is_dir() else path).read_bytes()
    state = reader.rest.get(_DATA)
    if state is not None and hashlib.sha256(text).hexdigest() != state["fingerprint"]["tokenizer"]:
        raise ConfigError(f"the tokenizer in {path} is not the one the model was trained with; pass --tokenizer")
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise ConfigError(
            f"the tokenizer in {path} has {tokenizer.get_vocab_size()} ids, the model {config.vocab_size}; "
            "pass --tokenizer with the one it was trained with"
        )
    return text, end_of_text_id(tokenizer)


def data_folder(run: Path) -> Path | None:
    """data.dir of a run's folder; None where it is none."""
    from omegaconf import OmegaConf

    path = run.resolve() / "config.yaml"
    if not path.is_file():
        return None
    try:
        found = OmegaConf.select(OmegaConf.create(OmegaConf.load(path)), "data.dir")
    except Exception as error:  # of YAML, of OmegaConf, of decoding
        raise ConfigError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    return None if found is None else Path(str(found))


@contextmanager
def folder_aside(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` that gets its name when the block ends, and vanishes when the block fails.

    Raises:
        ConfigError: the disk does not take it.
    """
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = command_parser("recipes.export", __doc__)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="a checkpoint folder, or a run's: its newest")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=5_000_000_000, help="weights beyond it go into another file"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder; default: the run's data folder")
    parser.add_argument("--max-position", type=int, help="max_position_embeddings; default: longest trained sequence")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; 0, or 2 after one line on stderr."""
    arguments = build_parser().parse_args(argv)

    def command() -> None:
        export(
            arguments.ckpt_path,
            arguments.out,
            arguments.dtype,
            arguments.max_shard_bytes,
            arguments.tokenizer,
            arguments.max_position,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print(f"wrote {arguments.out}")

    return exit_status(command, "stopped; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
