"""Texts, questions and long-context probes of one's own, scored while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lm.data.shards import load_manifest
from lm.data.tokenizer import end_of_text_id, load_tokenizer
from lm.errors import ConfigError
from lm.evaluation.long_context import check_task
from lm.evaluation.probes import DEPTHS, Probes, filler_of, make_probes, run_probes
from lm.evaluation.questions import Question, ask, likeliest, read_questions
from lm.evaluation.text import BATCH_TOKENS, Scorer, read_documents, score_file
from lm.loss import IGNORE
from plugins.callbacks.samples import continuations, evaluating
from plugins.callbacks.step_end import due

_HEAD = 10_000  # characters; one token for so many is none that a tokenizer has


class Evaluation(Callback):
    """Records how texts, questions and probes score, in the middle of the run.

    eval_bpb/<name> and eval_loss/<name> of text files, exact_match/<name> and answer_nats_per_byte/<name> of question
    files, probe_exact/<task>_<length> and probe_nats_per_byte/<task>_<length> of probes, means over five depths. <name>
    is a file's name without its ending. Every rank scores everything, so that ranks which share parameters never wait
    for one that is done. Global random state is not touched, nor is a weight.

    Args:
        texts: text or JSONL files, see lm.evaluation.text.read_documents.
        questions: JSONL files, see lm.evaluation.questions.read_questions; the probability of an answer moves long
            before a model writes it to the letter, so both are recorded.
        every_n_steps: optimizer steps between evaluations; the last step is always evaluated.
        context: tokens that every token of a later window of a text has before it, a window less one at most; null:
            half a window.
        max_new_tokens: of an answer, each one pass over all prompts at once; 0 records no exact match of questions.
        probes: long-context tasks, see lm.evaluation.long_context.TASKS, made of the run's held-out text.
        lengths: of the probes, tokens; one longer than the windows of a stage waits for a stage with longer ones.
    """

    def __init__(
        self,
        texts: list[str] | None = None,
        questions: list[str] | None = None,
        every_n_steps: int = 1000,
        context: int | None = None,
        max_new_tokens: int = 16,
        probes: list[str] | None = None,
        lengths: list[int] | None = None,
    ) -> None:
        files = [*(texts or ()), *(questions or ())]
        if not files and not probes:
            raise ConfigError("evaluation: give texts or questions, lists of files, or probes, a list of tasks")
        names = [Path(file).stem for file in files]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"evaluation: two files are named {twice[0]}, and metrics go by name; rename one")
        if every_n_steps < 1:
            raise ConfigError(f"evaluation: every_n_steps must be at least 1, got {every_n_steps}")
        for name, value in (("context", context), ("max_new_tokens", max_new_tokens)):
            if value is not None and value < 0:
                raise ConfigError(f"evaluation: {name} must be at least 0, got {value}")
        if bool(probes) != bool(lengths):
            raise ConfigError("evaluation: probes and lengths belong together; give both")
        for task in probes or ():
            check_task(task)
        self.texts, self.question_files = [Path(file) for file in texts or ()], [Path(file) for file in questions or ()]
        self.every_n_steps, self.context, self.max_new_tokens = every_n_steps, context, max_new_tokens
        self.probes, self.lengths = list(dict.fromkeys(probes or ())), sorted(set(lengths or ()))
        self._questions: dict[str, list[Question]] = {}
        self._probes: Probes = {}
        self._tokenizer: Any = None
        self._eot_id = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Read everything once now: a file that is not there should not end a run that has trained for an hour."""
        folder = getattr(trainer.datamodule, "dir", None)
        if folder is None:
            raise ConfigError("evaluation: the run has no data folder to take the tokenizer from")
        self._tokenizer = load_tokenizer(folder)
        self._eot_id = end_of_text_id(self._tokenizer)
        self._questions = {path.stem: read_questions(path) for path in self.question_files}
        for path in self.texts:
            texts = read_documents(path)
            # A beginning is enough to tell, and a book takes a while.
            heads = (text[:_HEAD] for text in texts)
            if not any(len(self._tokenizer.encode(head, add_special_tokens=False).ids) > 1 for head in heads):
                raise ConfigError(f"evaluation: {path} has no document of two tokens or more")
        if self.probes:
            self._make_probes(trainer.datamodule)

    def _make_probes(self, datamodule: Any) -> None:
        """Those that some stage's windows hold, of held-out sentences."""
        longest = max(stage.sequence_length for stage in datamodule.plan.stages)
        lengths = [length for length in self.lengths if length <= longest]
        if not lengths:
            raise ConfigError(f"evaluation: lengths {self.lengths} are all longer than the run's windows of {longest}")
        filler = filler_of(load_manifest(datamodule.dir), self._tokenizer, lengths[-1])
        self._probes = make_probes(self._tokenizer, filler, self.probes, lengths)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if due(trainer, batch_idx, self.every_n_steps):
            try:
                pl_module.record(self.scores(trainer, batch["input_ids"].shape[1]))
            except ConfigError as error:  # whether a run that diverged goes on is not for its evaluation to say
                rank_zero_warn(f"no evaluation of step {trainer.global_step}: {error}")

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

        def write(prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
            return continuations(trainer, prompts, new_tokens, window)

        context = window // 2 if self.context is None else min(self.context, window - 1)
        values: dict[str, float] = {}
        with evaluating(trainer.strategy.model), torch.no_grad():
            for path in self.texts:
                text = score_file(score, self._tokenizer, path, window, context)
                values[f"eval_bpb/{path.stem}"], values[f"eval_loss/{path.stem}"] = text.bits_per_byte, text.loss
            for name, questions in self._questions.items():
                if self.max_new_tokens:
                    rows = max(1, BATCH_TOKENS // window)
                    found = ask(score, write, self._tokenizer, questions, self._eot_id, self.max_new_tokens, rows)
                    values[f"exact_match/{name}"] = found.exact_match
                    values[f"answer_nats_per_byte/{name}"] = -found.per_byte
                else:
                    values[f"answer_nats_per_byte/{name}"] = self._nats_per_byte(score, questions)
            held = {cell: probes for cell, probes in self._probes.items() if cell[1] <= window}
            for cell in run_probes(score, write, self._tokenizer, self._eot_id, held):
                for kind, value in (("exact", cell.exact_match), ("nats_per_byte", -cell.log_probability)):
                    key = f"probe_{kind}/{cell.task}_{cell.length}"
                    values[key] = values.get(key, 0.0) + value / len(DEPTHS)
        return values

    def _nats_per_byte(self, score: Scorer, questions: Sequence[Question]) -> float:
        """Of the likeliest answers, mean over the questions."""
        prompts = [self._tokenizer.encode(question.prompt, add_special_tokens=False).ids for question in questions]
        pairs = zip(questions, prompts, strict=True)
        return -sum(likeliest(score, self._tokenizer, one, ids)[1] for one, ids in pairs) / len(questions)
