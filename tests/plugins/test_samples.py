"""Continuations are those of the model itself, and go into a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lm.data.tokenizer import load_tokenizer
from lm.errors import ConfigError
from plugins.callbacks.samples import Samples
from tests.distributed.dashboard_jobs import LENGTH, train, write_data
from tests.distributed.scenario import SINGLE

PROMPTS = ["ab", "longer than the other"]  # the second one passes the window of 16 tokens


class Plain(Callback):
    """Token by token, one prompt at a time, no padding: what greedy continuations must be."""

    def __init__(self, data: Path, new_tokens: int):
        self.data, self.new_tokens = data, new_tokens

    @torch.no_grad()
    def on_train_end(self, trainer, module):
        tokenizer = load_tokenizer(self.data)
        self.texts, self.modes = [], {m.training for m in module.modules()}
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt).ids
            start = len(ids)
            for _ in range(self.new_tokens):
                ids.append(int(module.model(torch.tensor([ids[-LENGTH:]]))[0, -1].argmax()))
                if ids[-1] == 0:
                    break
            self.texts.append(tokenizer.decode(ids[start:]))


def test_greedy_text_is_the_models_own(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    plain = Plain(data, 12)
    train(SINGLE, data, [Samples(PROMPTS, 2, max_new_tokens=12), plain], 3, default_root_dir=tmp_path)
    assert plain.modes == {True}
    files = sorted((tmp_path / "samples").iterdir())
    assert [path.name for path in files] == ["step-00000002.txt", "step-00000003.txt"]
    wanted = "\n\n".join(f"=== {p}\n{p}|{text}" for p, text in zip(PROMPTS, plain.texts, strict=True)) + "\n"
    assert files[1].read_text() == wanted
    assert all(len(text) > 3 for text in plain.texts)


class Diverges(Callback):
    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *args):
        module.model.embedding.weight.fill_(float("nan"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_that_diverged_goes_on_without_samples(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("plugins.callbacks.samples.rank_zero_warn", said.append)
    callbacks = [Diverges(), Samples(PROMPTS, 2, max_new_tokens=2, temperature=temperature)]
    train(SINGLE, write_data(tmp_path / "data"), callbacks, 2, default_root_dir=tmp_path)
    assert len(said) == 1 and said[0].startswith("no samples of step 2: the model's logits are not finite")
    assert not (tmp_path / "samples").exists()


def test_a_temperature_draws_the_same_text_again_and_another_seed_another(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    texts = []
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        callback = Samples(PROMPTS, 2, max_new_tokens=12, temperature=1.0, seed=seed)
        train(SINGLE, data, [callback], 2, default_root_dir=tmp_path / name)
        texts.append((tmp_path / name / "samples" / "step-00000002.txt").read_text())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a", ""]}, "none of them empty"),
        ({"temperature": -1}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_use_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Samples(**{"prompts": ["a"], **arguments})
