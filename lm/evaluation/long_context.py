"""Does a model use its whole window? Tasks with known answers, made from any text, at any length and depth.

After RULER (Hsieh et al. 2024, arXiv 2404.06654): a needle, several needles, variables that point to each other, and
the name that occurs most. The filler is the user's own text, the secrets are drawn from a seed. A task is scored by the
probability of its answer as well as by exact match, since a small model seldom writes an answer to the letter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from lm.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASKS = ("needle", "needles", "variables", "frequent")
_NEEDLES = 4
_HOPS = 4
_FREQUENT, _RARE = 3, 12
_ROUNDING = 8  # tokens that a text may have more than its parts
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


@dataclass(frozen=True)
class Probe:
    """One question about a long text.

    Attributes:
        task: one of TASKS.
        length: tokens asked for, prompt and answer together.
        depth: where in the text the (first) needle lies, 0 its beginning and 1 its end.
        prompt: text.
        answers: parts that the answer must hold, each.
        ids: tokens of the prompt, at most `length`.
    """

    task: str
    length: int
    depth: float
    prompt: str
    answers: tuple[str, ...]
    ids: tuple[int, ...]


def check_task(task: str) -> None:
    """Raise ConfigError for a task that there is not."""
    if task not in TASKS:
        raise ConfigError(f"long-context task {task!r} is unknown; take one of {', '.join(TASKS)}")


def make_probe(task: str, tokenizer: Tokenizer, filler: Sequence[str], length: int, depth: float, seed: int) -> Probe:
    """A prompt of `length` tokens or a few less, the same for the same arguments.

    Args:
        filler: sentences of ordinary text, enough of them; they are used in an order drawn from the seed.
        depth: from 0 to 1.

    Raises:
        ConfigError: unknown task, depth outside [0, 1], length too small for the task, or too little filler.
    """
    check_task(task)
    if not 0 <= depth <= 1:
        raise ConfigError(f"depth must be from 0 to 1, got {depth}")
    rng = random.Random(f"{task} {length} {depth} {seed}")
    needles, question, answers = _MAKERS[task](rng)
    room = (
        length
        - _count(tokenizer, "".join(needles) + question)
        - sum(_count(tokenizer, " " + a) for a in answers)
        - _ROUNDING
    )
    if room < 0:
        raise ConfigError(f"a context of {length} tokens is too short for the task {task}: it needs {length - room}")
    sentences = _fill(tokenizer, filler, room, rng)
    if task == "needle":
        places = [round(depth * len(sentences))]
    else:  # the first at the depth asked for, the others in order behind it
        first = round(depth * len(sentences))
        places = sorted([first, *(rng.randint(first, len(sentences)) for _ in needles[1:])])
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        sentences.insert(place, needle)
    prompt = "".join(sentences) + question
    return Probe(task, length, depth, prompt, answers, tuple(tokenizer.encode(prompt, add_special_tokens=False).ids))


def _needle(rng: random.Random) -> tuple[list[str], str, tuple[str, ...]]:
    key, value = _name(rng), _number(rng)
    return [f" The secret number of {key} is {value}."], f"\nThe secret number of {key} is", (value,)


def _needles(rng: random.Random) -> tuple[list[str], str, tuple[str, ...]]:
    """One of several: the model must pick by the name."""
    names = _names(rng, _NEEDLES)
    values = [_number(rng) for _ in names]
    asked = rng.randrange(_NEEDLES)
    needles = [f" The secret number of {name} is {value}." for name, value in zip(names, values, strict=True)]
    return needles, f"\nThe secret number of {names[asked]} is", (values[asked],)


def _variables(rng: random.Random) -> tuple[list[str], str, tuple[str, ...]]:
    names, value = _names(rng, _HOPS), _number(rng)
    chain = [f" Let {names[0]} = {value}."]
    chain += [f" Let {later} = {former}." for former, later in pairwise(names)]
    return chain, f"\nThe value of {names[-1]} is", (value,)


def _frequent(rng: random.Random) -> tuple[list[str], str, tuple[str, ...]]:
    """Aggregation: one name occurs more often than any other."""
    names = _names(rng, _RARE + 1)
    needles = [f" {names[0]} came in." for _ in range(_FREQUENT)] + [f" {name} came in." for name in names[1:]]
    rng.shuffle(needles)
    return needles, "\nWho came in most often? It was", (names[0],)


_MAKERS: dict[str, Callable[[random.Random], tuple[list[str], str, tuple[str, ...]]]] = {
    "needle": _needle,
    "needles": _needles,
    "variables": _variables,
    "frequent": _frequent,
}


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=5))


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[_name(rng)] = None
    return list(names)


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _fill(tokenizer: Tokenizer, filler: Sequence[str], room: int, rng: random.Random) -> list[str]:
    """Sentences of at most `room` tokens together."""
    order = list(filler)
    rng.shuffle(order)
    chosen, left = [], room
    for sentence in order:
        words = sentence.split(" ")
        while words and _count(tokenizer, " " + " ".join(words)) > left:  # the last one is cut to what is left
            words.pop()
        if words:
            chosen.append(" " + " ".join(words))
            left -= _count(tokenizer, chosen[-1])
        if left < _ROUNDING:
            return chosen
    raise ConfigError(f"the filler text is too short: {room - left} of {room} tokens; give a longer one")


def sentences_of(texts: Sequence[str], shortest: int = 20, longest: int = 400) -> list[str]:
    """Sentences of ordinary texts, each on one line, none twice."""
    found: dict[str, None] = {}
    for text in texts:
        for sentence in " ".join(text.split()).split(". "):
            sentence = sentence.strip()
            if shortest <= len(sentence) <= longest:
                found[sentence.rstrip(".") + "."] = None
    return list(found)


@dataclass(frozen=True)
class EffectiveLength:
    """How far a model's accuracy carries, in tokens.

    Attributes:
        holds_to: longest length up to which accuracy stays at the share of the shortest length's; None where the model
            answers nothing at the shortest.
        falls_at: first length below the share; None where none of those tried is, or `holds_to` is None.
    """

    holds_to: int | None
    falls_at: int | None


def effective_length(accuracy: dict[int, float], share: float = 0.85) -> EffectiveLength:
    """Where accuracy first falls below `share` of the shortest length's.

    Args:
        accuracy: by length in tokens.
    """
    lengths = sorted(accuracy)
    base = accuracy[lengths[0]]
    if base <= 0:
        return EffectiveLength(None, None)
    below = next((i for i, length in enumerate(lengths) if accuracy[length] < share * base), len(lengths))
    return EffectiveLength(lengths[below - 1], lengths[below] if below < len(lengths) else None)
