"""What near-duplicates cost: one model on the same tokens, with planted ones and after the pipeline took them out.

The demo's corpus in small, without near-duplicates of its own. In `planted` a share of the documents are edited copies
of others (2 to 5% of their words replaced); `deduplicated` is that corpus after the stage near_duplicates. Both hold
out the same documents, none of which is copied, share one tokenizer, and draw all sources alike. Each seed trains both
on as many tokens as the deduplicated corpus has, which is part of the other. Prints a table on stderr and JSON:
    corpora       documents and train tokens of each
    copies        planted in all, and of each source
    runs          per corpus and seed: validation loss (nats per token), and bits per byte of each source
    differences   planted less deduplicated, paired by seed: mean, 95% interval, verdict
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.errors import ConfigError
from recipes.command import command_parser
from recipes.paired import paired

PLANTED, DEDUPLICATED = "planted", "deduplicated"
# J of a copy is .63 to .82: wide bands, so that most of them are found.
STAGE = {"bands": 20, "rows": 5, "min_similarity": 0.5}
FRACTION = 0.1  # of the documents held out
_WORD = re.compile(r"\w+")


def build_parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    parser = command_parser("recipes.bench duplicates", __doc__)
    parser.add_argument("--config", type=Path, default=Path("conf/data/demo.yaml"), help="the corpus")
    parser.add_argument("--megabytes", type=float, default=0.3, help="text of each source before copies")
    parser.add_argument("--share", type=float, default=0.15, help="copies among the documents that are trained on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=float, default=1.0, help="tokens of a run over the deduplicated corpus' own")
    parser.add_argument("--d-model", type=int, default=48)
    parser.add_argument("--n-layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def run(argv: list[str]) -> dict[str, Any]:
    """Measure, print and return the result."""
    options = build_parser().parse_args(argv)
    if not 0 < options.share < 1 or options.seeds < 1 or options.passes <= 0 or options.megabytes <= 0:
        raise ConfigError("--share must lie between 0 and 1; --seeds, --passes and --megabytes must be positive")
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(Path(temporary), options)
    print(table(result), file=sys.stderr)
    print(json.dumps(result))
    return result


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What `run` prints."""
    import torch

    import recipes.build  # noqa: F401  before quiet(), which mends the log handlers that it brings
    from lm.data.shards import load_manifest
    from recipes.cpu import keep_freed_memory
    from recipes.data import load_config
    from recipes.pretrain import quiet

    quiet()
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    config, _ = load_config(options.config)
    counts = write_texts(folder / "text", config.sources, options)
    prepare_both(folder, list(counts), config.vocab_size)
    manifests = {name: load_manifest(folder / name) for name in (PLANTED, DEDUPLICATED)}
    tokens = {name: manifest.tokens("train") for name, manifest in manifests.items()}
    length = options.passes * sum(tokens[DEDUPLICATED].values())
    runs = []
    for seed in range(options.seeds):
        for name in (PLANTED, DEDUPLICATED):
            runs.append({"corpus": name, "seed": seed, **train(folder / name, list(counts), length, seed, options)})
            print(f"seed {seed}, {name}: loss {runs[-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    measures = [key for key in runs[0] if key.startswith(("val_loss", "bpb"))]
    return {
        "benchmark": "duplicates",
        "corpora": {
            name: {
                "documents": sum(int(manifest.split(source, "train")["documents"]) for source in counts),
                "train_tokens": tokens[name],
            }
            for name, manifest in manifests.items()
        },
        "copies": {"all": sum(counts.values()), **counts},
        "tokens_a_run": int(length),
        "runs": runs,
        "differences": {key: difference(runs, key) for key in measures},
        "torch": torch.__version__,
        **{key: getattr(options, key) for key in ("megabytes", "share", "seeds", "passes", "d_model", "n_layers")},
    }


def difference(runs: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Planted less deduplicated."""
    value = {(run["corpus"], run["seed"]): run[key] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    found = paired([(seed, value[PLANTED, seed] - value[DEDUPLICATED, seed]) for seed in seeds])
    ends = {} if len(seeds) < 2 else {"low": found.low, "high": found.high}
    return {"mean": found.mean, **ends, "verdict": f"planted is {found.word}"}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{'':<16}{PLANTED:>12}{DEDUPLICATED:>14}{'difference':>12}{'95% interval':>22}"]
    for key, found in result["differences"].items():
        means = [
            float(np.mean([run[key] for run in result["runs"] if run["corpus"] == name]))
            for name in (PLANTED, DEDUPLICATED)
        ]
        ends = f"({found['low']:+.4f}, {found['high']:+.4f})" if "low" in found else "one seed: unknown"
        lines.append(f"{key:<16}{means[0]:>12.4f}{means[1]:>14.4f}{found['mean']:>+12.4f}{ends:>22}")
    return "\n".join(lines)


# -- the corpora


def write_texts(folder: Path, sources: Sequence[Any], options: argparse.Namespace) -> dict[str, int]:
    """Writes <source>.jsonl with originals and copies, shuffled; copies planted of each source.

    A document's group decides its split, and a copy has its original's: copies are of documents that are trained on.
    """
    from lm.data.documents import split_of

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    counts = {}
    for spec in sources:
        rows = originals(spec, options.megabytes * 1e6, rng)
        trained = [row for row in rows if split_of(b"", row["group"], FRACTION) == "train"]
        vocabulary = np.array(sorted({word for row in rows for word in _WORD.findall(row["text"])}), dtype=object)
        copies = round(len(trained) * options.share / (1 - options.share))
        chosen = [trained[i] for i in rng.integers(0, len(trained), copies)]
        rows += [{**row, "text": edited(row["text"], vocabulary, rng)} for row in chosen]
        order = rng.permutation(len(rows))
        lines = [json.dumps(rows[i]) for i in order]
        (folder / f"{spec.name}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        counts[spec.name] = copies
    return counts


def originals(spec: Any, size: float, rng: np.random.Generator) -> list[dict[str, str]]:
    """Documents of a source at random, none a near-duplicate of another: text and a group for its split."""
    from lm.data.documents import Report, utf8_of
    from lm.data.pipeline.near import clusters, signatures
    from lm.data.sources import kind_of

    found, texts = [], []
    for document in kind_of(spec).documents(spec):
        encoded = utf8_of(document.text, Report())
        if encoded is not None:
            found.append(document)
            texts.append(encoded.decode())
    b, r = int(STAGE["bands"]), int(STAGE["rows"])
    cluster = clusters(signatures(texts, b * r), b, r, STAGE["min_similarity"])
    first = np.unique(cluster, return_index=True)[1]
    rows: list[dict[str, str]] = []
    taken = 0
    for i in rng.permutation(first).tolist():
        taken += len(texts[i].encode())
        if taken > size and rows:
            break
        rows.append({"text": texts[i], "group": found[i].group or f"{spec.name}-{i}"})
    return rows


def edited(text: str, vocabulary: Any, rng: np.random.Generator) -> str:
    """The text with 2 to 5% of its words replaced by others of the source."""
    rate = rng.uniform(0.02, 0.05)

    def other(found: re.Match[str]) -> str:
        return str(vocabulary[rng.integers(len(vocabulary))]) if rng.random() < rate else found[0]

    return _WORD.sub(other, text)


def prepare_both(folder: Path, sources: Sequence[str], vocab_size: int) -> None:
    """The two data folders, with the tokenizer of the deduplicated one.

    Raises:
        ConfigError: they do not hold out the same documents.
    """
    from lm.data.pipeline.kinds import stage_specs
    from lm.data.prepare import PrepareConfig, prepare
    from lm.data.shards import load_manifest
    from lm.data.sources import SourceSpec

    stage = stage_specs([{"kind": "near_duplicates", **STAGE}], "the benchmark")
    for name, stages in ((DEDUPLICATED, stage), (PLANTED, ())):
        tokenizer = None if name == DEDUPLICATED else folder / DEDUPLICATED / "tokenizer.json"
        specs = tuple(
            SourceSpec(
                source, "jsonl", "as its source",
                {"data_files": str(folder / "text" / f"{source}.jsonl"), "group": "group"}, stages,
            )
            for source in sources
        )  # fmt: skip
        config = PrepareConfig(specs, vocab_size, validation_fraction=FRACTION, tokenizer_file=tokenizer)
        prepare(config, folder / name)
    held_out = [_held_out(load_manifest(folder / name), sources) for name in (PLANTED, DEDUPLICATED)]
    if held_out[0] != held_out[1]:
        raise ConfigError("the two corpora hold out different documents: near_duplicates dropped a held-out one")


def _held_out(manifest: Any, sources: Sequence[str]) -> list[Any]:
    from lm.data.shards import TokenStream

    found = []
    for source in sources:
        stream = TokenStream(manifest, source, "validation")
        ids = np.empty(stream.n_tokens, dtype=np.int64)
        stream.read_into(0, ids)
        ends = np.flatnonzero(ids == manifest.eot_id) + 1
        found.append(sorted(part.tobytes() for part in np.split(ids, ends[:-1])))  # documents, in any order
    return found


# -- a run


def train(
    folder: Path, sources: Sequence[str], tokens: float, seed: int, options: argparse.Namespace
) -> dict[str, float]:
    """Train one model; validation loss and bits per byte, over all and by source."""
    from lm.data.shards import load_manifest
    from recipes.build import build

    sequence_length, sequences = 128, 4
    vocab_size = load_manifest(folder).vocab_size
    with tempfile.TemporaryDirectory() as place:
        parts = build(
            {
                "name": "run",
                "runs_dir": place,
                "tokens": float(tokens),
                "seed_everything": seed,
                "model": {
                    "config": {
                        "vocab_size": vocab_size, "d_model": options.d_model, "n_layers": options.n_layers,
                        "n_heads": max(1, options.d_model // 32), "init_std": 0.1, "embedding_init_std": 0.5,
                        "zero_init_head": True, "mup": {"base_width": 64},
                    },
                    "optim": {
                        "lr": 8e-3, "eps": 1e-10,
                        "schedule": {"kind": "cosine", "warmup_steps": 40, "floor": 0.0},
                    },
                    "seed": seed,
                    "runtime": {"compile": False},
                },
                "data": {
                    "dir": str(folder), "sequence_length": sequence_length,
                    "global_batch_tokens": sequences * sequence_length, "weights": dict.fromkeys(sources, 1.0),
                    "validation_windows": 10_000, "seed": seed,
                },
                "trainer": {
                    "accelerator": "cpu", "devices": 1, "precision": "32-true", "logger": False,
                    "enable_checkpointing": False, "enable_progress_bar": False, "callbacks": [],
                    "val_check_interval": max(1, round(tokens / (sequences * sequence_length))),
                    "num_sanity_val_steps": 0,
                },
            }
        )  # fmt: skip
        parts.trainer.fit(parts.module, datamodule=parts.data)
    metrics = parts.module.metrics
    return {name: float(value) for name, value in metrics.items() if name.startswith(("val_loss", "bpb"))}
