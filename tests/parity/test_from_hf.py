"""--from-hf: a run that starts from a Hugging Face folder, sharded or not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lm.config import ModelConfig
from lm.rope_scaling import RopeScaling
from recipes.export import main as export_main
from recipes.from_hf import folder_in
from tests.distributed import harness
from tests.parity import jobs
from tests.parity.conftest import VOCAB, experiment
from tests.parity.helpers import load_transformers, make, save_hf

# Sizes that two and four processes cannot share evenly.
CONFIG = ModelConfig(
    *(VOCAB, 42, 2, 3),
    n_kv_heads=1,
    d_ff=37,
    init_std=0.1,
    norm_eps=1e-6,
    rope_theta=50_000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 32),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder in several files."""
    folder = tmp_path_factory.mktemp("hf")
    save_hf(make(CONFIG), folder, max_shard_bytes=40_000)
    return folder


def test_each_rank_reads_its_part(folder: Path) -> None:
    """Uneven shards of one and two dimensions hold the folder's bits, and no rank reads more than it keeps."""
    for result in harness.run(jobs.start_sharded, 4, folder):
        for layout, (same, read, held) in result.items():
            assert same, layout
            assert read == held or layout == "interleaved", layout


def settings(runs: Path, corpus: Path, folder: Path, strategy: str, world_size: int) -> dict[str, Any]:
    """A run that hardly moves: its checkpoint holds the weights it started from. No shape is in the config."""
    config = experiment(runs, corpus, {"init_std": 0.5})
    config["model"]["optim"] = {"lr": 1e-14, "weight_decay": 0.0}
    config |= {"name": strategy, "from_hf": str(folder), "tokens": 512}
    config["trainer"] |= {"strategy": strategy, "devices": world_size, "log_every_n_steps": 1}
    config["trainer"] |= {"enable_progress_bar": False}
    return config


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("fsdp", 2), ("zero3", 2)])
def test_a_run_starts_from_the_folder(
    strategy: str, world_size: int, folder: Path, corpus: Path, tmp_path: Path
) -> None:
    """From Hugging Face, through a step and a checkpoint of each kind of strategy, to Hugging Face: the same model."""
    config = settings(tmp_path, corpus, folder, strategy, world_size)
    metrics = harness.run(jobs.fit, world_size, config)[0]
    assert export_main(["--ckpt_path", str(tmp_path / strategy), "--out", str(tmp_path / "out")]) == 0
    before, after = load_transformers(folder), load_transformers(tmp_path / "out")
    for (name, one), (_, other) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0, msg=name)
    assert after.config.rope_parameters == before.config.rope_parameters
    assert metrics["loss"] == pytest.approx(first_loss(corpus, config, before), rel=1e-5)


@torch.no_grad()
def first_loss(corpus: Path, config: dict[str, Any], reference: Any) -> float:
    """Loss of transformers' model on the run's first batch, document by document."""
    from lm.datamodule import TokenDataModule

    data = TokenDataModule(**config["data"])
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    nats, tokens = 0.0, 0
    for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
        for document in documents.unique():
            own = documents == document
            logits = reference(ids[own][None]).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, labels[own], reduction="none", ignore_index=-100)
            nats, tokens = nats + float(loss.sum()), tokens + int((labels[own] >= 0).sum())
    return nats / tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.config.n_layers", "3"], ["n_layers is 3", "has 2"]),
        (["--model.config.rope_scaling", "null"], ["rope_scaling is None"]),
        (["--model.config.qk_norm", "true"], ["qk_norm is True"]),
        (["--from_hf", "nowhere"], ["nowhere", "no Hugging Face model folder"]),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: list[str], folder: Path, corpus: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    import logging
    import sys

    from recipes.pretrain import main

    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(settings(tmp_path, corpus, folder, "single", 1)))
    line = ["pretrain", "fit", "--config", str(tmp_path / "experiment.yaml"), "--from-hf", str(folder), *arguments]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert main() == 2
    errors = [text for text in capfd.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]
    assert not (tmp_path / "single").exists()


def test_a_resumed_run_needs_the_folder_no_more(folder: Path, corpus: Path, tmp_path: Path, monkeypatch) -> None:
    """--ckpt_path last with the run's own config.yaml, after the folder has gone."""
    import shutil
    import sys

    from recipes.pretrain import main

    moved = tmp_path / "hf"
    shutil.copytree(folder, moved)
    config = settings(tmp_path, corpus, moved, "single", 1)
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    line = ["pretrain", "fit", "--config", str(tmp_path / "experiment.yaml")]
    monkeypatch.setattr(sys, "argv", line)
    assert main() == 0
    shutil.rmtree(moved)
    record = tmp_path / "single" / "config.yaml"
    assert yaml.safe_load(record.read_text())["from_hf"] == str(moved)
    monkeypatch.setattr(sys, "argv", [*line[:3], str(record), "--ckpt_path", "last", "--trainer.max_steps", "2"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--tokens", "1024"])
    assert main() == 0
    names = sorted(path.name for path in (tmp_path / "single" / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]


def test_where_the_folder_is_named(tmp_path: Path) -> None:
    """Command line before files, the last file before the first."""
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("from_hf: one")
    second.write_text("from_hf: two")
    files = ["fit", "--config", str(first), f"--config={second}"]
    assert folder_in(["fit"]) is None
    assert folder_in(files[:3]) == "one"
    assert folder_in(files) == "two"
    assert folder_in([*files, "--from-hf", "three"]) == folder_in([*files, "--from_hf=three"]) == "three"
    assert folder_in({"from_hf": "four"}) == "four"


def test_a_folder_from_transformers_itself(corpus: Path, tmp_path: Path) -> None:
    """Written by save_pretrained, read by --from-hf: defaults of config.json are those of transformers."""
    from lm.hf_weights import read_hf_config

    load_transformers_folder = tmp_path / "theirs"
    save_hf(make(CONFIG), tmp_path / "ours")
    load_transformers(tmp_path / "ours").save_pretrained(load_transformers_folder)
    assert json.loads((load_transformers_folder / "config.json").read_text())["transformers_version"]
    assert dataclasses.replace(read_hf_config(load_transformers_folder), init_std=0.1) == CONFIG
