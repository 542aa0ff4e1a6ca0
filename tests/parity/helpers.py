"""Models with random weights and their way to a Hugging Face folder and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.config import ModelConfig
from lm.data.files import write_json
from lm.hf import export_factor, hf_name, to_hf_config
from lm.hf_weights import write_weights
from lm.init import materialize
from lm.model import Llama

ORIGINAL = 128  # positions before the extension, in tests with RoPE scaling


def make(config: ModelConfig, seed: int = 0) -> Llama:
    """Random matrices, and norm gains that are not all 1."""
    with torch.device("meta"):
        model = Llama(config)
    materialize(model, config, seed, "cpu")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


def save_hf(model: Llama, folder: Path, dtype: torch.dtype = torch.float32, max_shard_bytes: int = 1 << 40) -> None:
    """A Hugging Face folder of a model in memory."""
    parameters = {hf_name(name): (name, parameter) for name, parameter in model.named_parameters()}

    def read(theirs: str) -> Tensor:
        name, parameter = parameters[theirs]
        return parameter * export_factor(name, model.config)

    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", to_hf_config(model.config, 512, 0, str(dtype).removeprefix("torch.")))
    shapes = {name: tuple(parameter.shape) for name, (_, parameter) in parameters.items()}
    write_weights(folder, shapes, read, dtype, max_shard_bytes)


def load_transformers(folder: Path) -> Any:
    """What AutoModelForCausalLM makes of a folder, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)


def random_ids(vocab_size: int, length: int, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
