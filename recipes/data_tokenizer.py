"""`python -m recipes.data tokenizer`: options, languages of documents, and the report as text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lm.data.files import DataError
from lm.errors import ConfigError

if TYPE_CHECKING:
    from lm.data.tokenizer_report import TextRow, TokenizerReport


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--dir", required=True, type=Path, help="prepared data folder")
    parser.add_argument("--language", nargs="+", default=[], metavar="SOURCE=CODE", help="of all of a source: web=de")
    parser.add_argument(
        "--parallel", nargs="+", default=[], metavar="CODE=FILE", help="texts that say the same, with en"
    )
    parser.add_argument("--max-tokens", type=float, default=20e6, help="most tokens read of a source (default 2e7)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> None:
    """Print the report; warnings to stderr.

    Raises:
        ConfigError: one line; an unknown source, a parallel text that cannot be read or no English one.
    """
    from lm.data.shards import load_manifest
    from lm.data.tokenizer_report import tokenizer_report

    manifest = load_manifest(arguments.dir)
    if not 1 <= arguments.max_tokens < float("inf"):
        raise ConfigError(f"--max-tokens must be at least 1, got {arguments.max_tokens:g}")
    declared = {
        name: source["language"] for name, source in manifest.content["sources"].items() if source.get("language")
    }
    declared |= _pairs("--language", arguments.language)
    unknown = sorted(set(declared) - set(manifest.source_names))
    if unknown:
        raise ConfigError(f"--language names {unknown[0]}; prepared sources: {', '.join(manifest.source_names)}")
    identify, note = _identifier() if set(manifest.source_names) - set(declared) else (None, "")
    parallel = {code: _text(Path(path)) for code, path in _pairs("--parallel", arguments.parallel).items()}
    if parallel and "en" not in parallel:
        raise ConfigError("--parallel needs the English text too: en=FILE")
    try:
        report = tokenizer_report(manifest, declared, identify, parallel, int(arguments.max_tokens))
    except (IndexError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        hint = f"python -m recipes.data verify --dir {arguments.dir} says which"
        raise DataError(f"shards in {arguments.dir} do not fit their tokenizer or are damaged; {hint}") from None
    report.notes.extend([note] if note else [])
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(report), "warnings": report.warnings()}, indent=1))
    else:
        print(format_report(report))
    for line in report.warnings():
        print(f"warning: {line}", file=sys.stderr)


def _pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    pairs = dict(value.partition("=")[::2] for value in values)
    if any(not name or not value for name, value in pairs.items()):
        raise ConfigError(f"{option} takes NAME=VALUE, got {' '.join(values)}")
    return pairs


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # not UTF-8, or no name of a file
        raise ConfigError(f"--parallel {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text.strip():
        raise ConfigError(f"--parallel {path} is empty")
    return text


def _identifier() -> tuple[Callable[[str], str] | None, str]:
    """(text -> language by the pipeline's model, empty); or None and what is missing."""
    from lm.data.pipeline.language import load_model, packaged_model, predict
    from lm.data.tokenizer_report import MIN_PROBABILITY, UNKNOWN

    try:
        model = load_model(packaged_model())
    except DataError as error:
        return None, f"languages are not told apart: {error}; or declare them: --language SOURCE=CODE"

    def identify(text: str) -> str:
        label, probability = predict(model, text)
        return label if label and probability >= MIN_PROBABILITY else UNKNOWN

    return identify, ""


def format_report(report: TokenizerReport) -> str:
    """The report as aligned text."""
    from lm.columns import aligned
    from lm.data.tokenizer_report import COVERED, MAX_COST

    numbers = ("documents", "tokens", "bytes/token", "characters/token", "tokens/word", "single byte, %", "partial, %")
    shown = report.languages[:20]
    parts = [
        f"vocabulary {report.vocab_size:,}; read {report.tokens_read:,} of {report.tokens_in_all:,} tokens\n"
        f"never seen: {report.never_seen:,} ids ({100 * report.never_seen / report.vocab_size:.1f}%);"
        f" {100 * report.covering:.1f}% of the vocabulary make up {100 * COVERED:.0f}% of the tokens",
        aligned([("source", *numbers), *map(_cells, report.sources)]),
        aligned([("language", *numbers, "cost"), *((*_cells(row), _cost(row)) for row in shown)])
        + "\ncost: tokens a character, English 1; Han, kana and Hangul characters count 3. --parallel says it exactly"
        + (f"\n{len(report.languages) - len(shown)} languages more: --json" if len(report.languages) > 20 else ""),
    ]
    if report.parallel:
        rows = [(name, f"{cost:.2f}{' (!)' if cost > MAX_COST else ''}") for name, cost in report.parallel.items()]
        parts.append(aligned([("parallel text", "tokens, English 1"), *rows]))
    parts += [f"note: {note}" for note in report.notes]
    return "\n\n".join(parts)


def _cells(row: TextRow) -> tuple[str, ...]:
    ratios = (row.bytes_per_token, row.characters_per_token, row.tokens_per_word)
    shares = (row.single_byte, row.partial)
    return (
        row.name,
        f"{row.documents:,}",
        f"{row.tokens:,}",
        *(f"{value:.3f}" for value in ratios),
        *(f"{100 * value:.1f}" for value in shares),
    )


def _cost(row: TextRow) -> str:
    return "" if row.cost is None else f"{row.cost:.2f}"
