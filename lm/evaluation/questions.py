"""Questions with known answers: exact match of what the model writes, and the probability of the right answer.

Exact match jumps where a model gets the last of several tokens right; the logarithm of the answer's probability moves
all the way there. A jump in the first without one in the second is an artefact of the measure (Schaeffer et al. 2023,
arXiv 2304.15004), so both are always reported together.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lm.errors import ConfigError
from lm.evaluation.text import Scorer, encodable, json_lines
from lm.generation import generate
from lm.loss import IGNORE
from lm.model import Llama

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

# (prompts as tokens, most new tokens) -> the likeliest continuation of each, as tokens.
# Under a strategy that shares a model out, every rank has to call it alike.
Writer = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


@dataclass(frozen=True)
class Question:
    """One line of a question file.

    Attributes:
        prompt: what the model is given, to the letter.
        answers: any of them is right.
    """

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Answered:
    """A question and what came of it.

    Attributes:
        written: what the model wrote, as many lines as the longest of the answers has.
        exact: whether it is one of the answers after `normalise`.
        log_probability: ln P(answer | prompt) of the likeliest of the answers, nats.
        per_byte: the same over the answer's UTF-8 bytes.
    """

    question: Question
    written: str
    exact: bool
    log_probability: float
    per_byte: float


@dataclass(frozen=True)
class QuestionScore:
    """Means over a question file.

    Attributes:
        exact_match: share of questions.
        log_probability: nats, mean over questions.
        per_byte: nats per byte of the answer, mean over questions.
        answered: every question.
    """

    answered: tuple[Answered, ...]

    @property
    def exact_match(self) -> float:
        return sum(row.exact for row in self.answered) / len(self.answered)

    @property
    def log_probability(self) -> float:
        return math.fsum(row.log_probability for row in self.answered) / len(self.answered)

    @property
    def per_byte(self) -> float:
        return math.fsum(row.per_byte for row in self.answered) / len(self.answered)

    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the exact match (Wilson 1927): questions are a sample of what could be asked."""
        n, p, z = len(self.answered), self.exact_match, 1.959964
        centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)


def normalise(text: str) -> str:
    """What is compared: NFKC, lower case, without ASCII punctuation and a, an, the, spaces made single.

    The rules of SQuAD's evaluation (Rajpurkar et al. 2016, arXiv 1606.05250) after Unicode's compatibility form. Where
    they leave nothing (the answer "A" of a choice, "..."), they are not applied: else an empty answer would be right.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    plain = _ARTICLES.sub(" ", folded.translate(_PUNCTUATION)).split()
    return " ".join(plain or folded.translate(_PUNCTUATION).split() or folded.split())


def read_questions(path: Path) -> list[Question]:
    """Lines of {"prompt": text, "answer": text or list of texts}.

    Raises:
        ConfigError: the file cannot be read, or the first line that is not one.
    """
    found = [_question(row, where) for where, row in json_lines(path)]
    if not found:
        raise ConfigError(f"{path} holds no question")
    return found


def _question(row: Any, where: str) -> Question:
    prompt, answers = (row.get("prompt"), row.get("answer")) if isinstance(row, dict) else (None, None)
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"{where}: no text under 'prompt'")
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) and one.strip() for one in answers):
        raise ConfigError(f"{where}: 'answer' must be a text or a list of texts, none of them empty")
    for text in (prompt, *answers):
        encodable(text, where)
    return Question(prompt, tuple(answers))


def writer(model: Llama, eot_id: int) -> Writer:
    """Writes by a model that this process has to itself, up to an end of text."""
    return lambda prompts, new_tokens: generate(model, prompts, new_tokens, {eot_id})


def ask(
    score: Scorer,
    write: Writer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    eot_id: int,
    max_new_tokens: int = 32,
    rows: int = 16,
) -> QuestionScore:
    """Greedy answers, each compared over as many lines as the right one has, and the probability of the right ones.

    The answer follows the prompt in tokens of its own, after one space where neither has one at the seam.

    Args:
        rows: prompts that are continued together.
    """
    answered: list[Answered] = []
    for part in _chunks(questions, rows):
        prompts = [tokenizer.encode(one.prompt, add_special_tokens=False).ids for one in part]
        for question, prompt, ids in zip(part, prompts, write(prompts, max_new_tokens), strict=True):
            text = tokenizer.decode(ids[: ids.index(eot_id)] if eot_id in ids else ids).lstrip("\n")
            best, per_byte = likeliest(score, tokenizer, question, prompt)
            written = _first_lines(text, max(map(_lines, question.answers)))
            answered.append(Answered(question, written, _is_right(text, question), best, per_byte))
    return QuestionScore(tuple(answered))


def _is_right(text: str, question: Question) -> bool:
    """Whether a continuation begins with one of the answers: what follows on further lines is not looked at."""
    return any(normalise(_first_lines(text, _lines(one))) == normalise(one) for one in question.answers)


def _lines(answer: str) -> int:
    return answer.strip().count("\n") + 1


def _first_lines(text: str, count: int) -> str:
    return "\n".join(text.split("\n")[:count]).strip()


def likeliest(score: Scorer, tokenizer: Tokenizer, question: Question, ids: Sequence[int]) -> tuple[float, float]:
    """(ln P, the same per byte) of the likeliest of a question's answers; `ids` are the prompt's tokens."""
    return max(answer_log_probability(score, tokenizer, question.prompt, ids, answer) for answer in question.answers)


def answer_log_probability(
    score: Scorer, tokenizer: Tokenizer, prompt: str, ids: Sequence[int], answer: str
) -> tuple[float, float]:
    """(ln P(answer | prompt), the same per byte of the answer).

    Args:
        prompt, ids: the prompt and its tokens.
    """
    seam = "" if prompt[-1:].isspace() or answer[:1].isspace() else " "
    wanted = tokenizer.encode(seam + answer, add_special_tokens=False).ids
    whole = torch.tensor([[*ids, *wanted]])
    labels = whole[:, 1:].clone()
    labels[:, : len(ids) - 1] = IGNORE
    value = -float(score(whole[:, :-1], labels, None).sum())
    return value, value / len((seam + answer).encode())


def _chunks(questions: Sequence[Question], size: int) -> Iterator[Sequence[Question]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]
