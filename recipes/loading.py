"""A trained model, from a checkpoint of any strategy or from a Hugging Face folder, for use outside of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lm.model import Llama


@dataclass(frozen=True)
class Trained:
    """What an evaluation needs of a model.

    Attributes:
        model: fp32, whole, on one device, in evaluation mode.
        tokenizer: the one it was trained with.
        eot_id: id of its end-of-text.
        window: longest sequence trained on, in tokens.
        path: checkpoint or folder it came from.
        run_dir: the run's folder; None where the checkpoint lies outside of one.
        step: optimizer steps done; None for a Hugging Face folder.
    """

    model: Llama
    tokenizer: Tokenizer
    eot_id: int
    window: int
    path: Path
    run_dir: Path | None = None
    step: int | None = None


def load_trained(path: Path, tokenizer: Path | None = None, device: str = "cpu") -> Trained:
    """Load a checkpoint, the newest of a run's folder, or a Hugging Face folder.

    Args:
        tokenizer: tokenizer.json or its folder; None: the run's data folder, or the Hugging Face folder.

    Raises:
        ConfigError: there is no model, it is damaged, or its tokenizer is not there.
    """
    if not path.is_dir():
        raise ConfigError(
            f"{path} is no folder; give a checkpoint (RUN/checkpoints/step-...), a run or an exported model"
        )
    if (path / "config.json").is_file():
        return _from_hf(path, tokenizer, device)
    return _from_checkpoint(path, tokenizer, device)


def _from_checkpoint(path: Path, tokenizer: Path | None, device: str) -> Trained:
    import torch

    from lm.data.tokenizer import tokenizer_from
    from lm.init import materialize
    from lm.model import Llama
    from recipes.export import config_of, find_tokenizer, open_checkpoint, trained_length

    reader = open_checkpoint(path)
    config = config_of(reader)
    text, eot = find_tokenizer(tokenizer, reader, config)
    with torch.device("meta"):
        model = Llama(config)
    materialize(model, config, 0, device, _Weights(reader))
    run_dir = reader.path.resolve().parent.parent
    return Trained(
        model.eval(), tokenizer_from(text), eot, trained_length(reader.rest), reader.path,
        run_dir if (run_dir / "config.yaml").is_file() else None, int(reader.rest.get("global_step", 0)),
    )  # fmt: skip


def _from_hf(path: Path, tokenizer: Path | None, device: str) -> Trained:
    from lm.data.tokenizer import load_tokenizer
    from lm.hf_weights import load_hf, read_config_values

    values = read_config_values(path)
    window = values.get("max_position_embeddings", 2048)
    if not isinstance(window, int) or window < 1:
        raise ConfigError(f"{path}/config.json: max_position_embeddings must be a whole number above 0, got {window!r}")
    found = load_tokenizer(path if tokenizer is None else tokenizer)
    model = load_hf(path, device)
    if found.get_vocab_size() > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {found.get_vocab_size()} ids, the model in {path} {model.config.vocab_size}; "
            "pass --tokenizer with the one it was trained with"
        )
    eot = values.get("eos_token_id")
    eot = eot[0] if isinstance(eot, list) and eot else eot
    if not isinstance(eot, int) or isinstance(eot, bool) or not 0 <= eot < model.config.vocab_size:
        raise ConfigError(f"{path}/config.json has no eos_token_id below the vocabulary's {model.config.vocab_size}")
    return Trained(model.eval(), found, eot, window, path)


class _Weights:
    """Where lm.init.materialize reads each parameter."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def fill(self, name: str, parameter: Any) -> None:
        from recipes.export import MODEL_PREFIX

        entry = self._reader.metadata.state_dict_metadata.get(MODEL_PREFIX + name)
        if entry is None or tuple(entry.size) != tuple(parameter.shape):
            raise ConfigError(f"{self._reader.path} has no {name} of shape {tuple(parameter.shape)}")
        self._reader.load({MODEL_PREFIX + name: parameter.data})
