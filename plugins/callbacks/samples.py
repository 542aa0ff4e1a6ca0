"""Continuations of fixed prompts while training goes on, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lm.data.files import write_bytes
from lm.data.tokenizer import END_OF_TEXT, end_of_text_id, load_tokenizer
from lm.errors import ConfigError
from lm.generation import Sampling, choose
from plugins.callbacks.step_end import due

GREEDY = Sampling()


class Samples(Callback):
    """Writes RUN/samples/step-00000100.txt after step 100, and the same text among the artifacts of the MLflow run.

    Every new token is one forward pass over all prompts, max_new_tokens of them on every rank whatever comes out, so
    that ranks which share parameters never wait for one that is done. Global random state is not touched.

    Args:
        prompts: texts, each continued as the beginning of a document.
        every_n_steps: optimizer steps between samples; the last step is always sampled.
        max_new_tokens: tokens of each continuation; it ends before that at an end of text.
        temperature: of sampling; 0 takes the likeliest token.
        seed: of sampling; the same step gives the same text.
    """

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: int = 1000,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ):
        if not prompts or not all(prompts):
            raise ConfigError("samples: prompts must be a list of texts, none of them empty")
        if every_n_steps < 1 or max_new_tokens < 1:
            raise ConfigError("samples: every_n_steps and max_new_tokens must be at least 1")
        self.prompts = list(prompts)
        self.every_n_steps = every_n_steps
        self.max_new_tokens = max_new_tokens
        self.sampling = Sampling(temperature, seed=seed)
        self._tokenizer: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        folder = getattr(trainer.datamodule, "dir", None)
        if folder is None:
            raise ConfigError("samples: the run has no data folder to take the tokenizer from")
        self._tokenizer = load_tokenizer(folder)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if due(trainer, batch_idx, self.every_n_steps):
            try:
                texts = self.texts(trainer, batch["input_ids"].shape[1])
            except ConfigError as error:  # whether a run that diverged goes on is not for its samples to say
                rank_zero_warn(f"no samples of step {trainer.global_step}: {error}")
                return
            if trainer.is_global_zero:
                self._write(trainer, texts)

    def texts(self, trainer: Any, window: int) -> list[str]:
        """Continuation of each prompt. Collective.

        Args:
            window: most tokens that the model looks back.
        """
        prompts = [self._tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in self.prompts]
        generator = torch.Generator().manual_seed(self.sampling.seed * 1_000_003 + trainer.global_step)
        with evaluating(trainer.strategy.model), torch.no_grad():
            found = continuations(trainer, prompts, self.max_new_tokens, window, self.sampling, generator)
        return [self._decoded(ids) for ids in found]

    def _decoded(self, ids: list[int]) -> str:
        end = end_of_text_id(self._tokenizer)
        if end not in ids:
            return str(self._tokenizer.decode(ids))
        return self._tokenizer.decode(ids[: ids.index(end)]) + END_OF_TEXT

    def _write(self, trainer: Any, texts: list[str]) -> None:
        """One file a step: small, complete when it is there, and easy to compare with that of another step."""
        folder = Path(trainer.default_root_dir) / "samples"
        path = folder / f"step-{trainer.global_step:08d}.txt"
        pairs = zip(self.prompts, texts, strict=True)
        content = "\n\n".join(f"=== {prompt}\n{prompt}|{text}" for prompt, text in pairs) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content.encode())
            for logger in trainer.loggers:
                if hasattr(logger, "log_artifact"):
                    logger.log_artifact(path, "samples")
        except Exception as error:  # a full disk or a tracking server that is down must not stop training
            rank_zero_warn(f"samples of step {trainer.global_step} are not kept everywhere: {error}")


def continuations(
    trainer: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    window: int,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """`new_tokens` tokens after each prompt, past an end of text too: as many passes on every rank. Collective.

    Args:
        window: most tokens that the model looks back.
        generator: of the draws; a temperature of 0 needs none.
    """
    rows = [list(ids) for ids in prompts]
    width = min(window, max(map(len, prompts)) + new_tokens)
    generators = [generator or torch.Generator()] * len(rows)
    for _ in range(new_tokens):
        logits = trainer.strategy.predict_step(_batch(rows, width, trainer.strategy.root_device), 0)
        for row, token in zip(rows, choose(logits, sampling, generators), strict=True):
            row.append(token)
    return [row[len(ids) :] for ids, row in zip(prompts, rows, strict=True)]


def _batch(rows: list[list[int]], width: int, device: torch.device) -> dict[str, Tensor]:
    """The last `width` tokens of each row, padded behind, where nothing before it looks; and where each ends."""
    recent = [row[-width:] for row in rows]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in recent], device=device)
    return {"input_ids": ids, "at": torch.tensor([len(row) - 1 for row in recent], device=device)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, then each as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
