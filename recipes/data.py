"""Prepare data: named sources -> tokenized shards; and the table of what is there.

Examples:
  python -m recipes.data prepare --config conf/data/demo.yaml
  python -m recipes.data prepare --config conf/data/jsonl.yaml --out data/mine --workers 2
  python -m recipes.data verify --dir data/demo
  python -m recipes.data funnel --dir data/web           # what each stage took, and why
  python -m recipes.data funnel --dir data/web --samples # and up to ten documents a rule
  python -m recipes.data table --dir data/demo
  python -m recipes.data table --dir data/demo --tokens 4e6 --weights prose=2,reference=1,code=1
  python -m recipes.data table --dir data/demo --tokens 4e6 --weights 'prose[>=2048]=1,code[>=2048]=1'
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.errors import ConfigError
from recipes.command import command_parser, exit_status

if TYPE_CHECKING:
    from lm.data.executor import Executor
    from lm.data.prepare import PrepareConfig


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.data", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, summary: str, description: str) -> argparse.ArgumentParser:
        shape = argparse.RawDescriptionHelpFormatter
        return commands.add_parser(
            name, help=summary, description=description, epilog=parser.epilog, formatter_class=shape
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
        "Per source of the train split: documents, unique tokens, bytes per token, weight, draws, epochs.",
    )
    table.add_argument("--dir", required=True, type=Path, help="prepared data folder")
    table.add_argument("--tokens", type=float, help="length of the run (default: one pass over all tokens)")
    table.add_argument("--weights", help="name=weight,... (default: in proportion to tokens)")
    funnel = add(
        "funnel",
        "what each stage took",
        "Per source and stage: documents, bytes and tokens that were left, why documents fell, samples of them.",
    )
    funnel.add_argument("--dir", required=True, type=Path, help="prepared data folder")
    funnel.add_argument("--samples", action="store_true", help="also up to ten documents a rule")
    funnel.add_argument("--json", action="store_true", help="print funnel.json")
    verify = add(
        "verify",
        "read every shard and compare its hash",
        "Read every file of a data folder and compare its sha256 with the manifest.",
    )
    verify.add_argument("--dir", required=True, type=Path, help="prepared data folder")
    return parser


def load_config(path: Path) -> tuple[Any, str | None]:
    """(PrepareConfig, output folder) of a YAML file.

    Raises:
        DataError: one line; missing file, bad YAML, unknown or missing key.
    """
    from omegaconf import OmegaConf

    from lm.data.files import DataError
    from lm.data.pipeline.kinds import stage_specs
    from lm.data.prepare import PrepareConfig
    from lm.data.sources import SourceSpec
    from lm.data.tokenizer import given_vocab_size

    if not path.is_file():
        raise DataError(f"config {path} does not exist; examples are in conf/data/")
    try:
        raw = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:
        raise DataError(f"config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise DataError(f"config {path} must be a mapping with sources and tokenizer")
    known = {"out", "sources", "tokenizer", "validation_fraction", "shard_tokens", "executor", "workers"}
    _check_keys(raw, known, f"config {path}")
    tokenizer = raw.get("tokenizer") or {}
    _check_keys(tokenizer, {"vocab_size", "sample_bytes", "file"}, f"tokenizer in {path}")
    given = None
    if "file" in tokenizer:
        if len(tokenizer) > 1 or not isinstance(tokenizer["file"], str):
            raise DataError(f"tokenizer in {path} takes either file (a path) or vocab_size and sample_bytes")
        given = Path(tokenizer["file"])
        tokenizer = {"vocab_size": given_vocab_size(given)}
    if "vocab_size" not in tokenizer or not isinstance(raw.get("sources"), dict):
        raise DataError(f"config {path} needs sources (a mapping by name) and tokenizer.vocab_size (or file)")
    specs = []
    for name, options in raw["sources"].items():
        if not isinstance(options, dict) or "kind" not in options:
            raise DataError(f"source '{name}' in {path} needs a kind")
        rest = {key: value for key, value in options.items() if key not in ("kind", "licence", "stages")}
        stages = stage_specs(options.get("stages") or [], f"source '{name}' in {path}")
        licence = str(options.get("licence", "not stated"))
        specs.append(SourceSpec(str(name), str(options["kind"]), licence, rest, stages))
    numbers = {key: raw[key] for key in ("validation_fraction", "shard_tokens", "workers") if key in raw}
    if "sample_bytes" in tokenizer:
        numbers["tokenizer_sample_bytes"] = tokenizer["sample_bytes"]
    for key, value in {**numbers, "tokenizer.vocab_size": tokenizer["vocab_size"]}.items():
        kind, name = (int | float, "number") if key == "validation_fraction" else (int, "whole number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise DataError(f"{key} in {path} must be a {name}, got {value!r}")
    return PrepareConfig(
        sources=tuple(specs),
        vocab_size=tokenizer["vocab_size"],
        tokenizer_file=given,
        **numbers,
        executor=str(raw.get("executor", "local")),
    ), raw.get("out")


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
        prepare(config, Path(folder), arguments.overwrite, log=_log, executor=executor)
    print_table(Path(folder), None, None)


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
    print(funnel_table(rows) + ("\n" + funnel_samples(rows) if samples else ""), end="")


def print_table(folder: Path, tokens: float | None, weights: str | None) -> None:
    """Print the epoch table of a data folder, and warnings above 4 epochs."""
    from lm.data.epochs import epoch_rows, format_table, repeat_warnings
    from lm.data.order import DataOrder
    from lm.data.plan import DataPlan, Stage
    from lm.data.shards import load_manifest
    from lm.data.slices import train_tokens

    if tokens is not None and not 0 < tokens < float("inf"):
        raise ConfigError(f"--tokens must be positive, got {tokens:g}")
    manifest = load_manifest(folder)
    available = manifest.tokens("train")
    mix = parse_weights(weights) if weights else {name: float(n) for name, n in available.items()}
    order = DataOrder(DataPlan(0, 1, (Stage(0, 1, mix),)), train_tokens(manifest, mix))
    rows = epoch_rows(manifest, order, int(tokens or sum(available.values())))
    print(format_table(rows))
    for line in repeat_warnings(rows):
        print(f"warning: {line}", file=sys.stderr)


def parse_weights(text: str) -> dict[str, float]:
    """`a=2,b=1` as a mapping.

    Raises:
        ValueError: another form.
    """
    weights = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")  # the last one: a slice of a source may hold another, web[>=8192]=1
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--weights takes name=number,name=number, got '{part}'") from None
    return weights


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
        else:
            print_table(arguments.dir, arguments.tokens, arguments.weights)

    return exit_status(command, "stopped; the same command goes on from the last finished part")


if __name__ == "__main__":
    sys.exit(main())
