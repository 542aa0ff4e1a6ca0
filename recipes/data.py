"""Prepare data: named sources -> tokenized shards; and the table of what is there.

Examples:
  python -m recipes.data prepare --config conf/data/demo.yaml
  python -m recipes.data prepare --config conf/data/jsonl.yaml --out data/mine --workers 2
  python -m recipes.data prepare --config conf/data/stages.yaml --executor ray --workers 2
  python -m recipes.data verify --dir data/demo
  python -m recipes.data funnel --dir data/web           # what each stage took, and why
  python -m recipes.data funnel --dir data/web --samples # and up to ten documents a rule
  python -m recipes.data table --dir data/demo
  python -m recipes.data table --dir data/demo --tokens 4e6 --weights prose=2,reference=1,code=1
  python -m recipes.data table --dir data/demo --tokens 4e6 --weights 'prose[>=2048]=1,code[>=2048]=1'
  python -m recipes.data table --dir data/demo --sequence-length 1024 --packing best_fit
  python -m recipes.data lengths --dir data/demo
  python -m recipes.data tokenizer --dir data/demo --language code=code
  python -m recipes.data table --dir data/demo --tokens 4e6 --weights temperature=3.33     # or unimax=4
  python -m recipes.data table --config conf/experiment/demo.yaml --json   # a run's own stages, callbacks too
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.errors import ConfigError
from recipes import data_tokenizer
from recipes.command import command_parser, exit_status
from recipes.data_table import add_table_arguments, print_table, run_table
from recipes.files import read_config

if TYPE_CHECKING:
    from lm.data.executor import Executor
    from lm.data.prepare import PrepareConfig
    from lm.data.sources import SourceSpec


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.data", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=description, epilog=parser.epilog, formatter_class=parser.formatter_class
        )

    prepare = add(
        "prepare",
        "text to shards",
        "Read, deduplicate, split, tokenize. Interrupted, the same command goes on where it stopped.",
    )
    prepare.add_argument("--config", required=True, type=Path, help="YAML file, see conf/data/")
    prepare.add_argument("--out", type=Path, help="output folder (default: `out` of the config)")
    prepare.add_argument("--overwrite", action="store_true", help="replace an output made from another config")
    prepare.add_argument("--executor", choices=("local", "ray"), help="where parts run (default: of the config, local)")
    prepare.add_argument("--workers", type=int, help="processes, or cores of a local Ray (default: of the config, 1)")
    table = add(
        "table",
        "sources, tokens, epochs",
        "Per source of the train split: documents, unique tokens, bytes per token, weight, draws, epochs, and the last"
        " three per stage. Candidate mixes are compared by small runs with python -m sweeps.mix.",
    )
    add_table_arguments(table)
    lengths = add(
        "lengths",
        "tokens a document, by source",
        "Percentiles of document lengths, and the share of the tokens in long documents; train split.",
    )
    lengths.add_argument("--dir", required=True, type=Path, help="prepared data folder")
    lengths.add_argument("--json", action="store_true", help="print the figures as JSON")
    lengths.add_argument("--plot", type=Path, metavar="FILE", help="also draw them: .png, .svg or .pdf")
    funnel = add(
        "funnel",
        "what each stage took",
        "Per source and stage: documents, bytes and tokens that were left, why documents fell, samples of them.",
    )
    funnel.add_argument("--dir", required=True, type=Path, help="prepared data folder")
    funnel.add_argument("--samples", action="store_true", help="also up to ten documents a rule")
    funnel.add_argument("--json", action="store_true", help="print funnel.json")
    report = add(
        "tokenizer",
        "what the tokenizer makes of the text",
        "Per source and language: bytes a token, single-byte tokens, what a language costs; use of the vocabulary.",
    )
    data_tokenizer.add_options(report)
    verify = add(
        "verify",
        "read every shard and compare its hash",
        "Read every file of a data folder and compare its sha256 with the manifest.",
    )
    verify.add_argument("--dir", required=True, type=Path, help="prepared data folder")
    return parser


def load_config(path: Path) -> tuple[PrepareConfig, str | None]:
    """(what to prepare, output folder) of a YAML file.

    Raises:
        ConfigError: one line; missing file, bad YAML, unknown or missing key.
    """
    from lm.data.files import DataError
    from lm.data.options import QUOTES, whole
    from lm.data.pipeline.kinds import stage_specs
    from lm.data.prepare import PrepareConfig

    raw = read_config(path, "conf/data/")
    known = {"out", "sources", "stages", "tokenizer", "validation_fraction", "shard_tokens", "executor", "workers"}
    _check_keys(raw, known, f"config {path}")
    tokenizer, given = _tokenizer({} if raw.get("tokenizer") is None else raw["tokenizer"], path)
    if "vocab_size" not in tokenizer or not isinstance(raw.get("sources"), dict):
        raise DataError(f"config {path} needs sources (a mapping by name) and tokenizer.vocab_size (or file)")
    sources = tuple(_source(str(name), options, path) for name, options in raw["sources"].items())
    if not isinstance(raw.get("out"), str | None):
        raise DataError(f"out in {path} must be a folder ({QUOTES}), got {raw['out']!r}")
    numbers: dict[str, Any] = {
        key: whole(raw[key]) for key in ("validation_fraction", "shard_tokens", "workers") if key in raw
    }
    if "sample_bytes" in tokenizer:
        numbers["tokenizer_sample_bytes"] = whole(tokenizer["sample_bytes"])
    vocab_size = whole(tokenizer["vocab_size"])
    for key, value in {**numbers, "tokenizer.vocab_size": vocab_size}.items():
        kind, name = (int | float, "number") if key == "validation_fraction" else (int, "whole number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise DataError(f"{key} in {path} must be a {name}, got {value!r}")
    shared = stage_specs([] if raw.get("stages") is None else raw["stages"], f"config {path}", shared=True)
    executor = str(raw.get("executor", "local"))
    return PrepareConfig(
        sources, vocab_size=vocab_size, tokenizer_file=given, stages=shared, executor=executor, **numbers
    ), raw.get("out")


def _tokenizer(options: Any, path: Path) -> tuple[dict[str, Any], Path | None]:
    """(vocab_size and sample_bytes, the file of a tokenizer that is given)."""
    from lm.data.files import DataError
    from lm.data.tokenizer import given_vocab_size

    _check_keys(options, {"vocab_size", "sample_bytes", "file"}, f"tokenizer in {path}")
    if "file" not in options:
        return options, None
    if len(options) > 1 or not isinstance(options["file"], str):
        raise DataError(f"tokenizer in {path} takes either file (a path) or vocab_size and sample_bytes")
    given = Path(options["file"])
    return {"vocab_size": given_vocab_size(given)}, given


def _source(name: str, options: Any, path: Path) -> SourceSpec:
    from lm.data.files import DataError
    from lm.data.options import QUOTES
    from lm.data.pipeline.kinds import stage_specs
    from lm.data.sources import SourceSpec

    where = f"source '{name}' in {path}"
    if not isinstance(options, dict) or "kind" not in options:
        raise DataError(f"{where} needs a kind")
    rest = {key: value for key, value in options.items() if key not in ("kind", "licence", "stages", "language")}
    stages = stage_specs([] if options.get("stages") is None else options["stages"], where)
    language = options.get("language")
    if not isinstance(language, str | None):
        raise DataError(f"{where}: language must be a code ({QUOTES}), got {language!r}")
    return SourceSpec(name, str(options["kind"]), str(options.get("licence", "not stated")), rest, stages, language)


def _check_keys(mapping: Any, known: set[str], where: str) -> None:
    from lm.data.files import DataError

    if not isinstance(mapping, dict):
        raise DataError(f"{where} must be a mapping")
    unknown = sorted(str(key) for key in mapping if key not in known)
    if unknown:
        raise DataError(f"{where} has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def run_prepare(arguments: argparse.Namespace) -> None:
    """`prepare`: progress to stderr, the table to stdout."""
    from lm.data.files import DataError
    from lm.data.prepare import prepare

    config, out = load_config(arguments.config)
    folder = arguments.out or out
    if folder is None:
        raise DataError(f"config {arguments.config} names no out; pass --out DIR")
    given = {name: getattr(arguments, name) for name in ("executor", "workers") if getattr(arguments, name) is not None}
    config = replace(config, **given)
    with executor_of(config) as executor:
        made = prepare(config, Path(folder), arguments.overwrite, log=_log, executor=executor)
    print_table(made.folder)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def executor_of(config: PrepareConfig) -> contextlib.AbstractContextManager[Executor]:
    """What a config's executor and workers name."""
    from lm.data.executor import Processes, Serial

    if config.executor == "ray":
        from plugins.executors.ray_executor import RayExecutor

        return RayExecutor(config.workers)
    return Processes(config.workers) if config.workers > 1 else contextlib.nullcontext(Serial())


def run_verify(folder: Path) -> None:
    """`verify`: one line when all is whole."""
    from lm.data.shards import load_manifest, verify_files

    files, n_bytes = verify_files(load_manifest(folder))
    print(f"{folder}: {files} files, {n_bytes / 1e6:,.1f} MB, all as the manifest says")


def print_funnel(folder: Path, samples: bool, as_json: bool) -> None:
    """Print the funnel of a data folder.

    Raises:
        DataError: the folder has none.
    """
    from lm.data.files import DataError, read_json
    from lm.data.pipeline.funnel import JSON, funnel_samples, funnel_table

    path = folder / JSON
    if not path.is_file():
        raise DataError(f"{path} does not exist; it is written by `prepare` when a source of the config has stages")
    if as_json:
        print(path.read_text(), end="")
        return
    rows = read_json(path)
    try:
        text = funnel_table(rows) + ("\n" + funnel_samples(rows) if samples else "")
    except (KeyError, TypeError, AttributeError, ValueError):
        raise DataError(f"{path} is damaged (no funnel); prepare the data again with --overwrite") from None
    print(text, end="")


def print_lengths(folder: Path, as_json: bool, plot: Path | None) -> None:
    """Print how long the documents of each source are, and draw it."""
    import dataclasses
    import json

    from lm.data.lengths import format_lengths, length_row
    from lm.data.shards import load_manifest

    manifest = load_manifest(folder)
    if plot is not None and (plot.suffix not in (".png", ".svg", ".pdf") or not plot.parent.is_dir()):
        raise ConfigError(f"--plot {plot}: must end in .png, .svg or .pdf, in a folder that exists")
    rows = [length_row(manifest, name) for name in manifest.source_names]
    if plot is not None:
        from lm.data.lengths_plot import plot_lengths

        plot_lengths(rows, plot)
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if as_json else format_lengths(rows))


def main(argv: list[str] | None = None) -> int:
    """Entry point; 0, or 2 after one line on stderr."""
    arguments = build_parser().parse_args(argv)

    def command() -> None:
        if arguments.command == "prepare":
            run_prepare(arguments)
        elif arguments.command == "verify":
            run_verify(arguments.dir)
        elif arguments.command == "funnel":
            print_funnel(arguments.dir, arguments.samples, arguments.json)
        elif arguments.command == "tokenizer":
            data_tokenizer.run(arguments)
        elif arguments.command == "lengths":
            print_lengths(arguments.dir, arguments.json, arguments.plot)
        else:
            run_table(arguments)

    return exit_status(command, "stopped; the same command goes on from the last finished part")


if __name__ == "__main__":
    sys.exit(main())
