"""The table of a mix: what a run reads of each source, over all and per stage, as text and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lm.data.plan import PACKINGS
from lm.errors import ConfigError

MOST_TOKENS = 1e15  # times a block of samples it still is an int64


def add_table_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `recipes.data table`."""
    parser.add_argument("--dir", type=Path, help="prepared data folder (with --config: in place of its data.dir)")
    parser.add_argument("--config", type=Path, action="append", help="of a run: its mix, stages and length; repeatable")
    parser.add_argument("--tokens", type=float, help="length of the run (default: one pass, or the config's)")
    parser.add_argument(
        "--weights", help="name=weight,..., a rule such as unimax=4, or YAML in braces (default: by tokens)"
    )
    parser.add_argument("--sequence-length", type=int, help="T: also documents cut and padding of windows so long")
    parser.add_argument("--packing", choices=PACKINGS, default="cut", help="as data.packing; best_fit makes its index")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_table(arguments: argparse.Namespace) -> None:
    """`table`.

    Raises:
        ConfigError: options that do not go together, or a mix that cannot be.
    """
    tokens = arguments.tokens
    if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
        raise ConfigError(f"--tokens must be 1 to {MOST_TOKENS:g}, got {tokens:g}")
    length, packing = arguments.sequence_length, arguments.packing
    if length is not None and length < 1:
        raise ConfigError(f"--sequence-length must be at least 1, got {length}")
    if arguments.config:
        if arguments.weights is not None or length is not None or packing != "cut":
            raise ConfigError("--weights, --sequence-length and --packing are for --dir alone: a config has its own")
        content = table_of_config(arguments.config, arguments.dir, tokens)
    elif arguments.dir is None:
        raise ConfigError("table needs --dir, a prepared data folder, or --config of a run")
    else:
        if packing != "cut" and length is None:
            raise ConfigError(f"--packing {packing} needs --sequence-length: windows are packed for one length")
        content = table_of_folder(arguments.dir, tokens, arguments.weights, length, packing)
    show(content, arguments.json)


def print_table(folder: Path) -> None:
    """The table of one pass over a data folder that was just made: whatever it says, that stays."""
    try:
        show(table_of_folder(folder), False)
    except ConfigError as error:  # a source that is too small to be drawn in proportion
        print(f"warning: in proportion to tokens, {error}", file=sys.stderr)


def table_of_folder(
    folder: Path,
    tokens: float | None = None,
    weights: str | None = None,
    sequence_length: int | None = None,
    packing: str = "cut",
) -> dict[str, Any]:
    """Table of a run with one mix.

    Args:
        tokens: length of the run; None: that of one pass over all tokens.
        weights: as on the command line; None: in proportion to tokens.
        sequence_length: T; also what windows of T tokens do to the documents. None: not asked.
        packing: of these windows.
    """
    from lm.data.fragmentation import fragmentation_rows
    from lm.data.mix import Settled, rule_of, settled_weights
    from lm.data.order import DataOrder
    from lm.data.packing import packed_counts
    from lm.data.plan import DataPlan, Stage
    from lm.data.shards import load_manifest
    from lm.data.slices import train_tokens

    manifest = load_manifest(folder)
    available = manifest.tokens("train")
    total = int(tokens or sum(available.values()))
    mix: dict[str, Any] = dict(available) if weights is None else parse_weights(weights)
    rule = rule_of(mix, manifest.source_names)
    known = train_tokens(manifest, rule.sources if rule else mix)
    mix = settled_weights(mix, known, total)
    T = sequence_length or 1
    plan = DataPlan(0, T, (Stage(0, T, mix),), packing=packing)
    order = DataOrder(plan, train_tokens(manifest, mix), packed=packed_counts(manifest, plan))
    if tokens is None:  # so many tokens take more positions where there is padding
        total = round(total * total / sum(order.tokens_drawn(total).values()))
    windows = fragmentation_rows(manifest, plan, order.packed) if sequence_length else []
    return _content(manifest, order, total, [Settled(0, rule, mix)] if rule else [], windows)


def table_of_config(files: Sequence[Path], folder: Path | None = None, tokens: float | None = None) -> dict[str, Any]:
    """Table of the run that config files describe, with the stages that its callbacks bring; nothing is trained.

    Args:
        folder: in place of data.dir. tokens: in place of the config's.
    """
    from plugins.callbacks.long_context import LongContext
    from plugins.callbacks.wsd_anneal import WSDAnneal
    from recipes.build import parse
    from recipes.pretrain import quiet

    quiet()
    arguments = [part for path in files for part in ("--config", str(path))]
    # The plan does not depend on what trains it: one process here.
    here = {"accelerator": "cpu", "devices": "1", "num_nodes": "1", "strategy": "single", "precision": "32-true"}
    arguments += [part for name, value in here.items() for part in (f"--trainer.{name}", value)]
    arguments += ["--data.dir", str(folder)] if folder else []
    arguments += ["--tokens", repr(tokens)] if tokens else []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        cli = parse(arguments)
    data, trainer = cli.datamodule, cli.trainer
    steps, callbacks = trainer.max_steps, getattr(trainer, "callbacks", ())
    if steps < 1:
        raise ConfigError("the config names no length of the run: pass --tokens")
    data.trainer = trainer
    data.setup("validate")
    stage = SimpleNamespace(max_steps=steps, datamodule=data)
    for callback in callbacks:
        if isinstance(callback, WSDAnneal | LongContext):
            callback.setup(stage, cli.model, "validate")
    return _content(data.manifest, data.order, data.plan.ramp.tokens(steps), data.mixes, data.fragmentation())


def _content(
    manifest: Any, order: Any, total: int, mixes: Sequence[Any] = (), windows: Sequence[Any] = ()
) -> dict[str, Any]:
    from lm.data.epochs import epoch_rows, repeat_warnings, stage_rows

    rows = epoch_rows(manifest, order, total)
    return {
        "tokens": total,
        "sources": rows,
        "stages": stage_rows(order, total),
        "rules": list(mixes),
        "windows": list(windows),
        "warnings": repeat_warnings(rows),
        "plan": order.plan,
    }


def show(content: dict[str, Any], as_json: bool) -> None:
    """Print a table: text with warnings on stderr, or all of it as JSON."""
    from lm.data.epochs import format_stage_rows, format_stages, format_table
    from lm.data.fragmentation import format_fragmentation
    from lm.data.mix import format_rules

    if as_json:
        plain = {name: value for name, value in content.items() if name != "plan"}
        plain |= {name: [asdict(row) for row in content[name]] for name in ("sources", "stages", "windows")}
        print(json.dumps({**plain, "rules": [one.plain() for one in content["rules"]]}, indent=1))
        return
    print(format_table(content["sources"]))
    if len(content["plan"].stages) > 1:
        print(f"\n{format_stages(content['plan'], content['tokens'])}\n\n{format_stage_rows(content['stages'])}")
    if content["rules"]:
        print(f"\n{format_rules(content['rules'])}")
    if content["windows"]:
        print(f"\n{format_fragmentation(content['plan'].packing, content['windows'])}")
    for line in content["warnings"]:
        print(f"warning: {line}", file=sys.stderr)


def parse_weights(text: str) -> dict[str, Any]:
    """`a=2,b=1`, or a mapping in braces, as in a config.

    Raises:
        ConfigError: another form.
    """
    if text.lstrip().startswith("{"):
        import yaml
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            # Unlike yaml.safe_load it refuses a key that comes twice.
            return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(text)))
        except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise ConfigError(f"--weights is not YAML: {' '.join(str(error).split())}") from None
    weights = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")  # the last one: a slice of a source may hold another, web[>=8192]=1
        name = name.strip()
        if name in weights:
            raise ConfigError(f"--weights names '{name}' twice; give each source one weight")
        try:
            weights[name] = float(value)
        except ValueError:
            raise ConfigError(f"--weights takes name=number,name=number, got '{part}'") from None
    return weights
