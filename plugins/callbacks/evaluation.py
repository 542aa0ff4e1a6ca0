"""Texts and questions of one's own, scored while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor

from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError
from lm.evaluation.questions import Question, answer_log_probability, read_questions
from lm.evaluation.text import read_documents, score_file
from lm.loss import IGNORE
from plugins.callbacks.samples import due, evaluating


class Evaluation(Callback):
    """Records eval_bpb/<name> and eval_loss/<name> of text files, answer_nats_per_byte/<name> of question files.

    <name> is a file's name without its ending. Every rank scores everything, so that ranks which share parameters
    never wait for one that is done. Global random state is not touched, nor is a weight.

    Args:
        texts: text or JSONL files, see lm.evaluation.text.read_documents.
        questions: JSONL files, see lm.evaluation.questions.read_questions; of an answer the probability is recorded,
            which moves long before a model writes it to the letter (python -m recipes.evaluate reports both).
        every_n_steps: optimizer steps between evaluations; the last step is always evaluated.
        context: tokens that every token of a later window of a text has before it, a window less one at most; null:
            half a window.
    """

    def __init__(
        self,
        texts: list[str] | None = None,
        questions: list[str] | None = None,
        every_n_steps: int = 1000,
        context: int | None = None,
    ) -> None:
        files = [*(texts or ()), *(questions or ())]
        if not files:
            raise ConfigError("evaluation: give texts or questions, lists of files")
        names = [Path(file).stem for file in files]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"evaluation: two files are named {twice[0]}, and metrics go by name; rename one")
        if every_n_steps < 1:
            raise ConfigError(f"evaluation: every_n_steps must be at least 1, got {every_n_steps}")
        if context is not None and context < 0:
            raise ConfigError(f"evaluation: context must be at least 0, got {context}")
        self.texts, self.question_files = [Path(file) for file in texts or ()], [Path(file) for file in questions or ()]
        self.every_n_steps, self.context = every_n_steps, context
        self._questions: dict[str, list[Question]] = {}
        self._tokenizer: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Read everything once now: a file that is not there should not end a run that has trained for an hour."""
        folder = getattr(trainer.datamodule, "dir", None)
        if folder is None:
            raise ConfigError("evaluation: the run has no data folder to take the tokenizer from")
        self._tokenizer = load_tokenizer(folder)
        self._questions = {path.stem: read_questions(path) for path in self.question_files}
        for path in self.texts:
            texts = read_documents(path)
            if not any(len(self._tokenizer.encode(text, add_special_tokens=False).ids) > 1 for text in texts):
                raise ConfigError(f"evaluation: {path} has no document of two tokens or more")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if due(trainer, batch_idx, self.every_n_steps):
            pl_module.record(self.scores(trainer, batch["input_ids"].shape[1]))

    def scores(self, trainer: Any, window: int) -> dict[str, float]:
        """The metrics. Collective.

        Args:
            window: tokens the model sees at once.
        """

        def score(input_ids: Tensor, labels: Tensor, document_ids: Tensor | None) -> Tensor:
            device, length = trainer.strategy.root_device, input_ids.shape[1]
            behind = (0, -length % trainer.strategy.context_parallel)  # ranks that share a window want equal parts
            batch = {
                "input_ids": F.pad(input_ids, behind).to(device),
                "labels": F.pad(labels, behind, value=IGNORE).to(device),
            }
            out: Tensor = trainer.strategy.predict_step(batch, 0)
            return out[:, :length].double().cpu()

        context = window // 2 if self.context is None else min(self.context, window - 1)
        values: dict[str, float] = {}
        with evaluating(trainer.strategy.model), torch.no_grad():
            for path in self.texts:
                found = score_file(score, self._tokenizer, path, window, context)
                values[f"eval_bpb/{path.stem}"], values[f"eval_loss/{path.stem}"] = found.bits_per_byte, found.loss
            for name, questions in self._questions.items():
                rows = [self._per_byte(score, question) for question in questions]
                values[f"answer_nats_per_byte/{name}"] = -sum(rows) / len(rows)
        return values

    def _per_byte(self, score: Any, question: Question) -> float:
        """Of the likeliest of the answers."""
        ids = self._tokenizer.encode(question.prompt, add_special_tokens=False).ids
        return max(
            answer_log_probability(score, self._tokenizer, question.prompt, ids, answer)[1]
            for answer in question.answers
        )
