"""Tokenizing as `recipes.data prepare` does it: tokens/s on one process and on several, and of `tokenizers` alone.

Text: networkx and botocore as installed, by document; a tokenizer trained on it. Rounds are interleaved; medians.
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
from pathlib import Path
from statistics import median
from typing import Any

from recipes.command import command_parser


def corpus(n_bytes: int) -> list[str]:
    """Documents of the demo's packaged sources of code and manuals, in turn, again from the beginning if need be."""
    from lm.data.sources import SourceSpec, kind_of

    specs = [
        SourceSpec("code", "python", options={"packages": ["networkx"]}),
        SourceSpec("reference", "botocore", options={"services": ["iam", "s3", "rds"]}),
    ]
    found = [document.text for spec in specs for document in kind_of(spec).documents(spec)]
    texts = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in found if text]
    texts.sort(key=lambda text: hashlib.sha256(text.encode()).digest())  # sources mixed, the same each time
    size, taken = 0, []
    while size < n_bytes:
        for text in texts:
            taken.append(text)
            size += len(text.encode())
            if size >= n_bytes:
                break
    return taken


def write_text(folder: Path, texts: list[str]) -> Any:
    """The documents as `prepare` keeps them: a TextFile."""
    import numpy as np

    from lm.data.documents import TextFile

    encoded = [text.encode() for text in texts]
    target = TextFile(folder, "train")
    target.path.write_bytes(b"".join(encoded))
    target.ends_path.write_bytes(np.cumsum([len(text) for text in encoded]).astype("<i8").tobytes())
    return target


def timed(work: Callable[[], int], clock: Callable[[], float]) -> float:
    """What `work` counts, per second."""
    start = clock()
    count = work()
    return count / (clock() - start)


def measure(folder: Path, vocab_size: int, n_bytes: int, workers: int, rounds: int) -> dict[str, Any]:
    """What `run` prints."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from lm.data.encoder import encode_part
    from lm.data.executor import Processes, Serial
    from lm.data.files import sha256_file
    from lm.data.shards import ids_dtype
    from lm.data.tokenizer import encode_documents, train_tokenizer

    texts = corpus(n_bytes)
    tokenizer = train_tokenizer(dict.fromkeys(texts), vocab_size)
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    target, digest, dtype = write_text(folder, texts), sha256_file(path), ids_dtype(vocab_size)

    with Processes(workers) as processes:

        def encode(executor: Any) -> int:
            calls = ((part, path, digest, dtype) for part in target.parts())
            return sum(len(part.ids) for part in executor.map(encode_part, calls))

        def reference() -> int:
            return sum(len(ids) for ids in encode_documents(tokenizer, texts))

        tokens = encode(processes)  # starts the workers and lets all of them learn the common words
        encode(Serial())
        one, several, cpu, alone = [], [], [], []
        for _ in range(rounds):
            one.append(timed(lambda: encode(Serial()), time.perf_counter))
            several.append(timed(lambda: encode(processes), time.perf_counter))
            cpu.append(timed(lambda: encode(Serial()), time.process_time))
            alone.append(timed(reference, time.process_time))
    return {
        "hardware": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}",
        "load": round(os.getloadavg()[0], 1),
        "bytes": sum(len(text.encode()) for text in texts),
        "tokens": tokens,
        "vocab_size": vocab_size,
        "tokens_per_s": {"1": round(median(one)), str(workers): round(median(several))},
        "tokens_per_cpu_s": round(median(cpu)),
        "tokenizers_per_cpu_s": round(median(alone)),
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
