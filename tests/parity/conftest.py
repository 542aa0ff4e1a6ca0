"""A small corpus with a tokenizer of real merges, and a checkpoint that two processes wrote under fsdp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from recipes.data import main as data_main
from recipes.export import main as export_main
from tests.distributed import harness
from tests.parity import jobs

ROOT = Path(__file__).parents[2]
WORDS = ("the model reads a window of text", "Größe 12 345", "naïve café — déjà vu", "def f(x):\n    return x + 1")
VOCAB = 290


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rows = [f"{WORDS[i % 4]}, {i} times over, line {i * 7}\nand {WORDS[(i + 1) % 4]} again" for i in range(400)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    settings = {
        "out": str(folder / "data"),
        "sources": {"a": {"kind": "jsonl", "licence": "CC0", "data_files": str(folder / "a.jsonl")}},
        "tokenizer": {"vocab_size": VOCAB},
        "validation_fraction": 0.1,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert data_main(["prepare", "--config", str(folder / "config.yaml")]) == 0
    return folder / "data"


def experiment(folder: Path, corpus: Path, config: dict) -> dict:
    """A run of 4 steps with a checkpoint at the end and no logger."""
    return {
        "name": "small",
        "runs_dir": str(folder),
        "tokens": 4 * 512,
        "model": {"config": config, "optim": {"lr": 1e-3}},
        "data": {"dir": str(corpus), "sequence_length": 64, "global_batch_tokens": 512, "validation_windows": 4},
        "trainer": {
            "accelerator": "cpu",
            "logger": False,
            "callbacks": [{"class_path": "plugins.callbacks.checkpoint.PeriodicCheckpoint"}],
        },
    }


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, corpus: Path) -> Path:
    """RUN of a muP model with grouped heads, YaRN and a tied head: all that is folded or scaled on export."""
    folder = tmp_path_factory.mktemp("runs")
    config = {
        "vocab_size": VOCAB,
        "d_model": 48,
        "n_layers": 2,
        "n_heads": 6,
        "n_kv_heads": 2,
        "tie_embeddings": True,
        "init_std": 0.3,
        "mup": {"base_width": 16, "base_d_head": 32},
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position": 32},
    }
    settings = experiment(folder, corpus, config)
    settings["trainer"] |= {"strategy": "fsdp", "devices": 2}
    harness.run(jobs.fit, 2, settings)
    return folder / "small"


@pytest.fixture(scope="session")
def exported(run_folder: Path, tmp_path_factory) -> Path:
    """The run's newest checkpoint as a Hugging Face folder."""
    out = tmp_path_factory.mktemp("exported") / "new" / "model"
    assert export_main(["--ckpt_path", str(run_folder), "--out", str(out), "--max-shard-bytes", "50000"]) == 0
    return out
