"""Peak memory of `recipes.data prepare` over synthetic corpora of two sizes: reading, exact dedup, tokenizer, shards.

Each corpus is one JSONL file in a temporary folder (which needs about three times its size), one document in twenty
a copy of another; `prepare` runs on it in a process of its own. With --document the file holds one more document of
that size. Prints JSON, per size:
    peak_mb              largest resident memory of the command and its workers together, seen 20 times a second
    seconds, tokens, documents
and `growth`, the last peak_mb over the first.

Examples:
  python -m recipes.bench prepare
  python -m recipes.bench prepare --megabytes 100 1000 --workers 2
  python -m recipes.bench prepare --megabytes 10 --document 100     # one document of 100 MB
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from lm.errors import ConfigError
from recipes.command import command_parser

VOCABULARY = 30_000
PARAGRAPHS = 4000


def paragraphs(rng: random.Random) -> list[str]:
    """Sentences of words with Zipf-like frequencies; some words are not ASCII."""
    letters = "etaoinshrdlucmfwypvbgkäéжд"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(VOCABULARY)]
    weights = list(accumulate(1 / (rank + 10) for rank in range(VOCABULARY)))
    return [" ".join(rng.choices(words, cum_weights=weights, k=rng.randint(40, 120))) + "." for _ in range(PARAGRAPHS)]


def write_corpus(path: Path, n_bytes: int, document_bytes: int) -> None:
    """About n_bytes of JSONL: documents of 1 to 8 paragraphs and a number; one of document_bytes last, unless 0."""
    rng = random.Random(0)
    parts = paragraphs(rng)
    written, number, line = 0, 0, b""
    with path.open("wb") as file:
        while written < n_bytes:
            if not line or rng.random() >= 0.05:
                text = f"{rng.getrandbits(64):x} " + "\n\n".join(rng.choices(parts, k=rng.randint(1, 8)))
                line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
            written += file.write(line)
            number += 1
        size, long = 0, []
        while size < document_bytes:
            long.append(f"{rng.getrandbits(32)} {rng.choice(parts)}")
            size += len(long[-1].encode()) + 1
        if long:
            file.write(json.dumps({"text": "\n".join(long)}, ensure_ascii=False).encode() + b"\n")


def measure(folder: Path, megabytes: float, options: Any) -> dict[str, Any]:
    """One corpus prepared."""
    import psutil

    write_corpus(folder / "corpus.jsonl", int(megabytes * 1e6), int(options.document * 1e6))
    config = {
        "sources": {"synthetic": {"kind": "jsonl", "data_files": str(folder / "corpus.jsonl")}},
        "tokenizer": {"vocab_size": options.vocab_size, "sample_bytes": int(options.sample_bytes)},
        "workers": options.workers,
    }
    (folder / "config.json").write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "recipes.data", "prepare", "--config", str(folder / "config.json")]
    start, peak = time.monotonic(), 0
    log = folder / "log"
    with log.open("wb") as out:
        child = subprocess.Popen([*command, "--out", str(folder / "out")], stdout=out, stderr=out)
        family = psutil.Process(child.pid)
        while child.poll() is None:
            # Not the kernel's own peak: a child's starts at what its parent held when it forked.
            peak = max(peak, resident_bytes(family))
            time.sleep(0.05)
    if child.returncode:
        raise ConfigError(f"prepare failed: {log.read_text().strip().splitlines()[-1]}")
    split = json.loads((folder / "out" / "manifest.json").read_text())["sources"]["synthetic"]["splits"]
    return {
        "megabytes": megabytes,
        "peak_mb": round(peak / 1e6),
        "seconds": round(time.monotonic() - start, 1),
        "tokens": sum(part["tokens"] for part in split.values()),
        "documents": sum(part["documents"] for part in split.values()),
    }


def resident_bytes(process: Any) -> int:
    """Of a process and all below it; what ends meanwhile counts nothing."""
    import psutil

    total = 0
    try:
        members = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    for member in members:
        try:
            total += member.memory_info().rss
        except psutil.Error:
            continue
    return total


def run(argv: list[str]) -> None:
    """`recipes.bench prepare`."""
    parser = command_parser("recipes.bench prepare", __doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[20, 100], help="sizes, smallest first")
    parser.add_argument("--document", type=float, default=0, help="MB of one more document")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--sample-bytes", type=float, default=64e6, help="for the tokenizer; the default of prepare")
    options = parser.parse_args(argv)
    rows = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder), megabytes, options))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    growth = round(rows[-1]["peak_mb"] / rows[0]["peak_mb"], 2)
    print(json.dumps({"workers": options.workers, "sizes": rows, "growth": growth}, indent=1))
