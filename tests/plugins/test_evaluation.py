"""The Evaluation callback refuses before the first step what would end a run at its first evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm.config import ModelConfig
from lm.data.shards import load_manifest
from lm.data.synthetic import write_folder
from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError
from lm.evaluation.probes import filler_of, make_probes, run_probes
from lm.evaluation.questions import ask, read_questions, writer
from lm.evaluation.text import scorer
from lm.model import Llama
from plugins.callbacks.evaluation import Evaluation


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "has no document of two tokens or more"),
        (b"a", "has no document of two tokens or more"),
        (b"\xff\xfea\x00", "is not UTF-8 at byte 0"),
    ],
)
def test_texts_are_read_before_the_first_step(tmp_path: Path, content: bytes | None, message: str) -> None:
    ids = np.array([5, 6, 7, 0])
    write_folder(tmp_path / "data", {"a": {"train": [ids] * 4, "validation": [ids]}}, 300)
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    trainer = SimpleNamespace(datamodule=SimpleNamespace(dir=tmp_path / "data"))
    with pytest.raises(ConfigError, match=message):
        Evaluation([str(path)]).on_fit_start(trainer, None)
    path.write_text("two words")
    Evaluation([str(path)]).on_fit_start(trainer, None)


def test_arguments() -> None:
    for arguments, message in (
        ({}, "give texts or questions"),
        ({"texts": ["a/x.txt", "b/x.txt"]}, "two files are named x"),
        ({"texts": ["x.txt"], "every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        ({"texts": ["x.txt"], "context": -1}, "context must be at least 0, got -1"),
        ({"questions": ["x.jsonl"], "max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"probes": ["needle"]}, "probes and lengths belong together"),
        ({"texts": ["x.txt"], "lengths": [512]}, "probes and lengths belong together"),
        ({"probes": ["hay"], "lengths": [512]}, "long-context task 'hay' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            Evaluation(**arguments)


def trainer_of(model: Llama, folder: Path, window: int) -> Any:
    """What the callback asks of a trainer, for one process."""

    def predict_step(batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        out: torch.Tensor = model(batch["input_ids"], labels=batch.get("labels"), at=batch.get("at"))
        return out

    strategy = SimpleNamespace(
        model=model, root_device=torch.device("cpu"), context_parallel=1, predict_step=predict_step
    )
    plan = SimpleNamespace(stages=[SimpleNamespace(sequence_length=window)])
    return SimpleNamespace(strategy=strategy, datamodule=SimpleNamespace(dir=folder, plan=plan))


def test_probes_and_questions_score_as_outside_of_training(tmp_path: Path) -> None:
    """Token by token over whole windows, as every strategy can, against one process with a cache."""
    write_folder(tmp_path / "ids", {"a": {"train": [np.array([5, 0])], "validation": [np.array([5, 0])]}}, 300)
    tokenizer = load_tokenizer(tmp_path / "ids")
    texts = [
        f"Of {i} birds on the {'old ' * (i % 3)}wall, {i * 7} sang. None of {i + 90} flew away." for i in range(60)
    ]
    held_out = [np.array([*tokenizer.encode(text).ids, 0]) for text in texts]
    write_folder(tmp_path / "data", {"a": {"train": held_out, "validation": held_out}}, 300)
    torch.manual_seed(0)
    model = Llama(ModelConfig(vocab_size=300, d_model=32, n_layers=1, n_heads=2, d_ff=32, init_std=0.5)).train()
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "What sang?", "answer": ["birds", "the wall"]}\n{"prompt": "x", "answer": "y"}\n')

    trainer = trainer_of(model, tmp_path / "data", 640)
    callback = Evaluation(questions=[str(asked)], probes=["needle", "needle"], lengths=[1024, 512, 640])
    callback.on_fit_start(trainer, None)
    found = callback.scores(trainer, 640)  # 1,024 waits for longer windows
    assert model.training

    own = scorer(model), writer(model, 0), tokenizer
    filler = filler_of(load_manifest(tmp_path / "data"), tokenizer, 640)
    cells = run_probes(*own, 0, make_probes(own[2], filler, ["needle"], [512, 640]))
    score = ask(*own, read_questions(asked), 0, 16)
    wanted = {"exact_match/asked": score.exact_match, "answer_nats_per_byte/asked": -score.per_byte}
    for length in (512, 640):
        mine = [cell for cell in cells if cell.length == length]
        wanted[f"probe_exact/needle_{length}"] = float(np.mean([cell.exact_match for cell in mine]))
        wanted[f"probe_nats_per_byte/needle_{length}"] = -float(np.mean([cell.log_probability for cell in mine]))
    assert found == pytest.approx(wanted, rel=1e-5)

    quick = Evaluation(questions=[str(asked)], max_new_tokens=0)
    quick.on_fit_start(trainer, None)
    wanted = {"answer_nats_per_byte/asked": -score.per_byte}
    assert quick.scores(trainer, 640) == pytest.approx(wanted, rel=1e-5)


def test_lengths_that_no_stage_has_are_refused_before_the_first_step(tmp_path: Path) -> None:
    ids = np.array([5, 6, 7, 0])
    write_folder(tmp_path / "data", {"a": {"train": [ids] * 4, "validation": [ids]}}, 300)
    trainer = trainer_of(Llama(ModelConfig(vocab_size=300, d_model=16, n_layers=1, n_heads=1, d_ff=16)), tmp_path, 256)
    trainer.datamodule.dir = tmp_path / "data"
    with pytest.raises(ConfigError, match=r"lengths \[512\] are all longer than the run's windows of 256"):
        Evaluation(probes=["needle"], lengths=[512]).on_fit_start(trainer, None)
    with pytest.raises(ConfigError, match="filler text is too short"):
        Evaluation(probes=["needle"], lengths=[256]).on_fit_start(trainer, None)
