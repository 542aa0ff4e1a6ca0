"""Tokenizing as `recipes.data prepare` does it: tokens/s on one process and on several, and of `tokenizers` alone.

Text: sources of networkx and torch, reference of botocore, by document; a tokenizer trained on the first part of it.
Ids of pieces are remembered, so that each round is of text that was in none before: what is measured is a corpus that
goes on, not one that comes again. One worker, several and `tokenizers` take the same text in turn; medians over rounds.
Prints JSON:
    hardware             the cores that this process may use
    tokens_per_s         by number of workers, wall clock
    tokens_per_cpu_s     one worker, in its own processor time: other work on the machine counts less
    tokenizers_per_cpu_s the same documents by tokenizers' encode_batch_fast on one thread
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lm.errors import ConfigError
from recipes.command import command_parser


def corpus(n_bytes: int, parts: int) -> list[list[str]]:
    """Different documents of packaged code and manuals, in parts of n_bytes.

    Raises:
        ConfigError: there is not so much text.
    """
    from lm.data.sources import SourceSpec, kind_of

    specs = [
        SourceSpec("code", "python", options={"packages": ["networkx", "torch"]}),
        SourceSpec("reference", "botocore", options={"services": ["iam", "s3", "rds"]}),
    ]
    found = {document.text for spec in specs for document in kind_of(spec).documents(spec)}
    texts = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in found if text]
    texts.sort(key=lambda text: hashlib.sha256(text.encode()).digest())  # sources mixed, the same each time
    ends = np.cumsum([len(text.encode()) for text in texts])
    cuts = np.searchsorted(ends, n_bytes * np.arange(1, parts + 1)) + 1
    if cuts[-1] > len(texts):
        raise ConfigError(f"{ends[-1]:,} bytes of text are too few for {parts} parts of {n_bytes:,}; lower --bytes")
    return [texts[first:last] for first, last in zip([0, *cuts], cuts, strict=False)]


def write_text(folder: Path, texts: list[str]) -> Any:
    """The documents as `prepare` keeps them: a TextFile."""
    from lm.data.documents import TextFile

    folder.mkdir()
    encoded = [text.encode() for text in texts]
    target = TextFile(folder, "train")
    target.path.write_bytes(b"".join(encoded))
    target.ends_path.write_bytes(np.cumsum([len(text) for text in encoded]).astype("<i8").tobytes())
    return target


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """What `work` counts, per second by the clock and per second of this process' processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    count = work()
    return count / (time.perf_counter() - wall), count / (time.process_time() - cpu)


def measure(folder: Path, vocab_size: int, n_bytes: int, workers: int, rounds: int) -> dict[str, Any]:
    """What `run` prints."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from lm.data.encoder import encode_part
    from lm.data.executor import Processes, Serial
    from lm.data.files import sha256_file
    from lm.data.shards import ids_dtype
    from lm.data.tokenizer import encode_documents, train_tokenizer

    warm_up, *parts = corpus(n_bytes, rounds + 1)
    tokenizer = train_tokenizer(warm_up, vocab_size)
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    digest, dtype = sha256_file(path), ids_dtype(vocab_size)

    def encode(executor: Any, file: Any) -> int:
        calls = ((part, path, digest, dtype) for part in file.parts())
        return sum(len(part.ids) for part in executor.map(encode_part, calls))

    def reference(texts: list[str]) -> int:
        return sum(map(len, encode_documents(tokenizer, texts)))

    one, several, alone = [], [], []
    with Processes(workers) as processes:
        file = write_text(folder / "warm-up", warm_up)
        for executor in (processes, Serial()):  # starts the workers, and lets all of them learn the common words
            encode(executor, file)
        for number, texts in enumerate(parts):
            file = write_text(folder / str(number), texts)
            one.append(timed(partial(encode, Serial(), file)))
            several.append(timed(partial(encode, processes, file)))
            alone.append(timed(partial(reference, texts)))
    return {
        "hardware": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}",
        "load": round(os.getloadavg()[0], 1),
        "bytes_a_round": n_bytes,
        "vocab_size": vocab_size,
        "tokens_per_s": {
            "1": round(median(wall for wall, _ in one)),
            str(workers): round(median(wall for wall, _ in several)),
        },
        "tokens_per_cpu_s": round(median(cpu for _, cpu in one)),
        "tokenizers_per_cpu_s": round(median(cpu for _, cpu in alone)),
    }


def run(argv: list[str]) -> None:
    """`recipes.bench tokenize`."""
    parser = command_parser("recipes.bench tokenize", __doc__)
    parser.add_argument("--vocab-size", type=int, default=16_000)
    parser.add_argument("--bytes", type=float, default=10e6, help="text that is tokenized in a round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.vocab_size, int(arguments.bytes), arguments.workers, arguments.rounds)
    print(json.dumps(result, indent=1))
