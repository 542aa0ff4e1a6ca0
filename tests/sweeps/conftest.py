"""A tiny prepared corpus and a tiny sweep over it."""

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

WORDS = ["the", "a", "red", "blue", "old", "new", "house", "river", "stone", "bird", "sings", "falls", "over", "and"]


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of random sentences, prepared by recipes.data; vocabulary 300."""
    from recipes.data import main

    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for name, size in (("long", 60), ("short", 15)):
        rows = [{"text": " ".join(rng.choice(WORDS) for _ in range(size))} for _ in range(400)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = {
        name: {"kind": "jsonl", "licence": "CC0", "data_files": str(folder / f"{name}.jsonl")}
        for name in ("long", "short")
    }
    settings = {"sources": sources, "tokenizer": {"vocab_size": 300}, "validation_fraction": 0.1}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["prepare", "--config", str(folder / "config.yaml"), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture(scope="session")
def tiny_sweep(tiny_corpus: Path) -> dict[str, Any]:
    """Settings of six cells, a second or two each."""
    return {
        "name": "tiny",
        "experiment": "tiny",
        "budgets": {4e8: [8, 16, 24], 8e8: [16, 24, 32]},
        "data": {"dir": str(tiny_corpus), "sequence_length": 32, "validation_windows": 16},
        "model": {
            "n_layers": 1,
            "zero_init_head": True,
            "init_std": 0.1,
            "embedding_init_std": 0.5,
            "mup": {"base_width": 16, "base_d_head": 8},
        },
        "d_head": 8,
        "optim": {"lr": 8e-3, "eps": 1e-10, "schedule": {"kind": "cosine", "floor": 0.0}},
        "batch": {"sequences": 2, "at_tokens": 1e4, "exponent": 0.5},
        "warmup": {"min_steps": 5},
        "min_steps": 10,
    }


@pytest.fixture
def bucket(tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a bucket with the tiny corpus, in an S3 server of this machine; later processes find it too."""
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    store = fs.S3FileSystem(endpoint_override=settings["AWS_ENDPOINT_URL"], allow_bucket_creation=True)
    store.create_dir("corpora")
    fs.copy_files(str(tiny_corpus), "corpora/tiny", destination_filesystem=store)
    yield "s3://corpora/tiny"
    server.stop()
