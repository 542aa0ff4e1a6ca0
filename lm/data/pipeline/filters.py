"""Rules for web text by datatrove: Gopher's quality and repetition, C4's, FineWeb's; each reason is datatrove's.

datatrove's word splitter for English is spaCy's, which needs a model and is slow; here a pattern splits, and keeps
punctuation as words of its own as spaCy does, since the thresholds were chosen for such words.
"""

from __future__ import annotations

import math
import re
from functools import cache
from itertools import pairwise
from typing import Any

from lm.data.files import DataError
from lm.data.options import text_list
from lm.data.pipeline.stage import DocumentRule, Dropped, Kept, Outcome, PerDocument, Range, StageKind
from lm.data.pipeline.store import Item

_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_SHARES = ("_frac", "_ratio", "_thr")
_RATES = ("new_line_ratio",)  # line ends a word: more than one turns FineWeb's rule off
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？।॥])[\"'”’)\]]*\s+")

GOPHER_QUALITY = {
    "min_doc_words": 50,
    "max_doc_words": 100_000,
    "min_avg_word_length": 3,
    "max_avg_word_length": 10,
    "max_symbol_word_ratio": 0.1,
    "max_bullet_lines_ratio": 0.9,
    "max_ellipsis_lines_ratio": 0.3,
    "max_non_alpha_words_ratio": 0.8,
    "min_stop_words": 2,
    "stop_words": None,
}
GOPHER_REPETITION = {
    "dup_line_frac": 0.3,
    "dup_para_frac": 0.3,
    "dup_line_char_frac": 0.2,
    "dup_para_char_frac": 0.2,
    "top_n_grams": [[2, 0.2], [3, 0.18], [4, 0.16]],
    "dup_n_grams": [[5, 0.15], [6, 0.14], [7, 0.13], [8, 0.12], [9, 0.11], [10, 0.10]],
}
C4 = {
    "filter_no_terminal_punct": False,  # FineWeb (arXiv 2406.17557) left it out: it alone took about 30% of the tokens
    "remove_citations": True,
    "min_num_sentences": 5,
    "min_words_per_line": 3,
    "max_word_length": 1000,
    "filter_lorem_ipsum": True,
    "filter_javascript": True,
    "filter_curly_bracket": True,
    "filter_policy": True,
}
FINEWEB = {
    "line_punct_thr": 0.12,
    "line_punct_exclude_zero": False,
    "short_line_thr": 0.67,
    "short_line_length": 30,
    "char_duplicates_ratio": 0.01,
    "new_line_ratio": 0.3,
}


@cache
def _splitter() -> Any:
    from datatrove.utils.word_tokenizers import WordTokenizer

    class PatternTokenizer(WordTokenizer):
        """Words by a pattern, sentences at their end marks."""

        def word_tokenize(self, text: str) -> list[str]:
            return _WORD.findall(text)

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[start:end].strip() for start, end in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
            return [(start, end) for start, end in pairwise(cuts) if text[start:end].strip()]

    return PatternTokenizer()


def _run(kind: str, name: str) -> PerDocument:
    def rule_of(options: dict[str, Any]) -> DocumentRule:
        found = _filter(kind, name, options)

        def rule(item: Item) -> Outcome:
            return _outcome(found, item.string)

        return rule

    return PerDocument(rule_of)


def _filter(kind: str, name: str, options: dict[str, Any]) -> Any:
    try:
        from datatrove.pipeline import filters
    except ImportError:
        raise DataError(f"stage {kind} needs datatrove; install it: pip install 'scalewright[data]'") from None
    return getattr(filters, name)(language=_splitter(), **_arguments(options))


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Options as datatrove takes them: one stop word would be a list of its letters."""
    if options.get("stop_words") is None:
        return options
    return {**options, "stop_words": text_list(options["stop_words"])}


def _outcome(rule: Any, text: str) -> Outcome:
    from datatrove.data import Document

    document = Document(text=text, id="")
    try:
        verdict = rule.filter(document)
    except ZeroDivisionError:  # nothing but marks: datatrove's FineWeb rule divides by the words it has not found
        return Dropped("no words")
    kept, reason = verdict if isinstance(verdict, tuple) else (verdict, "")
    if not kept:
        return Dropped(reason)
    if document.text == text:
        return Kept()
    if not document.text.strip():
        return Dropped("no line left")
    cut = text.count("\n") - document.text.count("\n")
    return Kept(document.text.encode(), {"lines cut": cut} if cut else {})


def _allowed(options: dict[str, Any], low: float, off: bool) -> dict[str, Range | tuple[str, ...]]:
    """Shares go to 1, what is counted from `low` up; datatrove's own ways to switch a rule off are null and -1."""
    numbers = [name for name, value in options.items() if type(value) in (int, float)]
    shares = [name for name in numbers if name.endswith(_SHARES) and name not in _RATES]
    return {name: Range(low, 1 if name in shares else math.inf, off=off) for name in numbers}


KINDS = {
    name: StageKind(
        _run(name, rule), options, _allowed(options, low, off), changes=name == "c4", packages=("datatrove",)
    )
    for name, rule, options, low, off in (
        ("gopher_quality", "GopherQualityFilter", GOPHER_QUALITY, 0, True),
        ("gopher_repetition", "GopherRepetitionFilter", GOPHER_REPETITION, 0, True),
        ("c4", "C4QualityFilter", C4, -1, False),
        ("fineweb", "FineWebQualityFilter", FINEWEB, 0, False),
    )
}
