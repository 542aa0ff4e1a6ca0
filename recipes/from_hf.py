"""--from-hf DIR: what the command line must know of a Hugging Face folder before it reads the config."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_FLAGS = ("--from-hf", "--from_hf")


def folder_in(args: Sequence[str] | Mapping[str, Any] | None) -> str | None:
    """The folder that a command line, its config files or a config names, the last one said; None for none.

    Args:
        args: a command line without the program's name (None: sys.argv's), or a config.
    """
    if isinstance(args, Mapping):
        return args.get("from_hf")
    words = list(sys.argv[1:] if args is None else args)
    found = None
    for flag, value in _options(words):
        if flag in _FLAGS:
            return value  # the command line wins over files
        if flag == "--config":
            found = _folder_in_file(Path(value)) or found
    return found


def _resumes(args: Sequence[str] | Mapping[str, Any] | None) -> bool:
    words = sys.argv[1:] if args is None else list(args)
    return any(word.partition("=")[0] in ("--ckpt_path", "ckpt_path") for word in words)


def _options(words: list[str]) -> list[tuple[str, str]]:
    pairs = [(word, following) for word, following in zip(words, [*words[1:], ""], strict=True) if "=" not in word]
    return pairs + [(flag, value) for flag, equals, value in (word.partition("=") for word in words) if equals]


def _folder_in_file(path: Path) -> str | None:
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
        return values.get("from_hf")
    except Exception:
        return None  # the parser will say what is wrong with the file


def config_defaults(args: Sequence[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Defaults of model.config.* from the folder's config.json, by the names the parser knows.

    A config may repeat them; other values are an error when the model is built. A run that goes on from a checkpoint
    has them all in its config.yaml, and needs the folder no more.

    Raises:
        ConfigError: there is no such folder, or it holds another model than a Llama.
    """
    folder = folder_in(args)
    if folder is None or (not Path(folder).is_dir() and _resumes(args)):
        return {}
    from lm.hf import HF_FIELDS
    from lm.hf_weights import read_hf_config

    values = dataclasses.asdict(read_hf_config(folder))
    return {f"model.config.{field}": values[field] for field in HF_FIELDS if field in values}
