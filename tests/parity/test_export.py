"""recipes.export: what transformers makes of the folder, how much memory it takes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.config import ModelConfig, model_config_from
from lm.data.synthetic import random_documents, write_folder
from lm.data.tokenizer import END_OF_TEXT, load_tokenizer
from lm.model import Llama
from plugins.strategies.checkpoint_io import Reader, save
from recipes.export import main
from tests.parity.conftest import ROOT, VOCAB, WORDS
from tests.parity.helpers import load_transformers, make, random_ids


def our_model(checkpoint: Path) -> Llama:
    """The model of a checkpoint, without any of what export does."""
    reader = Reader(checkpoint)
    model = Llama(model_config_from(reader.rest["model_config"]))
    reader.load({f"param/model.{name}": parameter.detach() for name, parameter in model.named_parameters()})
    return model


@pytest.fixture
def model(run_folder: Path) -> Llama:
    return our_model(run_folder / "checkpoints" / "step-00000004")


def test_logits_of_a_run_with_mup_and_yarn(exported: Path, model: Llama) -> None:
    assert model.config.mup is not None and model.config.rope_scaling is not None and model.config.tie_embeddings
    reference = load_transformers(exported)
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    ids = random_ids(VOCAB, 128)
    ours, theirs = model(ids), reference(ids).logits
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_the_folder_holds_what_it_should(exported: Path) -> None:
    names = sorted(path.name for path in exported.iterdir())
    weights = [name for name in names if name.startswith("model-")]
    assert len(weights) > 2 and not list(exported.parent.glob(".*"))
    assert sorted(set(names) - set(weights)) == [
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((exported / "config.json").read_text())
    assert config["max_position_embeddings"] == 4 * 32 and config["bos_token_id"] is None


@torch.no_grad()
def greedy(model: Llama, ids: list[int], n_tokens: int, eos: int) -> list[int]:
    """The whole window again for each token."""
    for _ in range(n_tokens):
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
        if ids[-1] == eos:
            break
    return ids


def test_generates_the_same_tokens(exported: Path, model: Llama) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported, local_files_only=True)
    reference = load_transformers(exported)
    seen = set()
    for text in WORDS:
        inputs = tokenizer(text, return_tensors="pt")
        theirs = reference.generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist()
        ours = greedy(model, inputs["input_ids"][0].tolist(), 24, tokenizer.eos_token_id)
        assert theirs == ours
        seen |= set(theirs[inputs["input_ids"].shape[1] :])
    assert len(seen) > 4  # a model that repeats one token would agree by chance


def test_generation_stops_at_end_of_text(exported: Path, tmp_path: Path) -> None:
    """eos is known to generate: where the model's favourite is made end-of-text, it stops after it."""
    reference = load_transformers(exported)
    ids = torch.tensor([[5, 6, 7]])
    favourite = int(reference(ids).logits[0, -1].argmax())
    assert reference.generation_config.eos_token_id == 0 != favourite
    weight = reference.model.embed_tokens.weight
    with torch.no_grad():
        weight[[0, favourite]] = weight[[favourite, 0]]
    assert reference.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist() == [5, 6, 7, 0]


def test_auto_tokenizer_agrees_with_ours(exported: Path, corpus: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(corpus), AutoTokenizer.from_pretrained(exported, local_files_only=True)
    texts = [*WORDS, "  two  spaces\n\n\n", "日本語 🙂\u2028", f"spelled {END_OF_TEXT} out", "", " x", "it's 2026"]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert theirs(text)["input_ids"] == ids
        assert 0 not in ids
        assert theirs.decode(ids) == text
    assert max(len(theirs(text)["input_ids"]) for text in texts) < len(WORDS[0].encode()) * 2
    assert len(theirs(WORDS[0])["input_ids"]) < len(WORDS[0])  # merges are used
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token_id) == (END_OF_TEXT, 0, None)
    assert theirs.decode([0, ours.token_to_id("a")], skip_special_tokens=True) == "a"
    assert (exported / "tokenizer.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()


def test_bf16(run_folder: Path, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "bf16"
    assert main(["--ckpt_path", str(run_folder), "--out", str(out), "--dtype", "bfloat16"]) == 0
    from transformers import AutoModelForCausalLM

    half = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    whole = dict(load_transformers(exported).named_parameters())
    assert half.dtype == torch.bfloat16
    assert all(torch.equal(parameter, whole[name].bfloat16()) for name, parameter in half.named_parameters())


def one_error(capsys: pytest.CaptureFixture[str], *words: str) -> None:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0], lines[0]


def test_mistakes_are_one_line(run_folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    checkpoint, out = run_folder / "checkpoints" / "step-00000004", tmp_path / "out"
    other = tmp_path / "other"
    write_folder(other, {"a": {split: random_documents(2000, 300, 50, 0) for split in ("train", "validation")}}, 300)
    capsys.readouterr()
    for arguments, words in [
        (["--ckpt_path", str(checkpoint), "--out", str(tmp_path)], ["exists already"]),
        (["--ckpt_path", str(tmp_path / "none"), "--out", str(out)], ["none"]),
        (["--ckpt_path", str(checkpoint), "--out", str(out), "--tokenizer", str(other)], ["not the one"]),
        (["--ckpt_path", str(checkpoint), "--out", str(out), "--max-shard-bytes", "0"], ["--max-shard-bytes"]),
    ]:
        assert main(arguments) == 2
        one_error(capsys, *words)
        assert not out.exists()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lm.hf_weights._write_tensor", full)
    assert main(["--ckpt_path", str(checkpoint), "--out", str(out)]) == 2
    one_error(capsys, "No space left on device")
    assert not out.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def bare_checkpoint(folder: Path, config: ModelConfig, moments: bool = False) -> Path:
    """A checkpoint without a run around it."""
    model = make(config)
    tensors = {f"param/model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    if moments:
        tensors |= {
            f"optim/model.{name}/exp_avg": torch.ones_like(parameter) for name, parameter in model.named_parameters()
        }
    save(tensors, {"model_config": dataclasses.asdict(config), "global_step": 1}, folder, 1)
    return folder


def test_refused_models_and_checkpoints_without_a_run(tmp_path: Path, capsys, corpus: Path) -> None:
    small = ModelConfig(VOCAB, 32, 1, 2)
    capped = bare_checkpoint(tmp_path / "capped", dataclasses.replace(small, final_softcap=30.0))
    assert main(["--ckpt_path", str(capped), "--out", str(tmp_path / "out")]) == 2
    one_error(capsys, "final_softcap is 30.0")
    plain = bare_checkpoint(tmp_path / "plain", small)
    assert main(["--ckpt_path", str(plain), "--out", str(tmp_path / "out")]) == 2
    one_error(capsys, "--tokenizer DIR_OR_FILE")
    line = ["--ckpt_path", str(plain), "--out", str(tmp_path / "out"), "--max-position", "77"]
    assert main([*line, "--tokenizer", str(corpus / "tokenizer.json")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 77
    wide = bare_checkpoint(tmp_path / "wide", dataclasses.replace(small, vocab_size=512))
    assert main(["--ckpt_path", str(wide), "--out", str(tmp_path / "o"), "--tokenizer", str(corpus)]) == 2
    one_error(capsys, "290 ids, the model 512")


MEASURE = """
import sys
from pathlib import Path
import torch
from lm.hf_weights import HFWeights
from lm.init import materialize
from lm.model import Llama
from recipes.export import export, open_checkpoint

small, big, out, tokenizer = map(Path, sys.argv[1:])

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def growth(action):
    before = status("VmRSS:")
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins again from here
    kept = action()
    return status("VmHWM:") - before

def start_from(folder):
    weights = HFWeights(folder)
    with torch.device("meta"):
        model = Llama(weights.config)
    materialize(model, weights.config, 0, "cpu", weights)
    return model

def load_whole(path):
    reader = open_checkpoint(path)
    keys = reader.metadata.state_dict_metadata
    tensors = {key: torch.empty(tuple(entry.size)) for key, entry in keys.items() if key.startswith("param/")}
    reader.load(tensors)
    return tensors

export(small, out / "small", tokenizer=tokenizer)  # imports everything
start_from(out / "small")
print(growth(lambda: export(big, out / "big", tokenizer=tokenizer)))
print(growth(lambda: start_from(out / "big")))
print(growth(lambda: load_whole(big)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to reset a peak")
def test_peak_memory(tmp_path: Path, corpus: Path) -> None:
    """Exporting 43 MB of weights takes less than a third of them; starting from a folder takes them once."""
    config = ModelConfig(VOCAB, d_model=384, n_layers=6, n_heads=6, d_ff=1024)
    small = bare_checkpoint(tmp_path / "small", dataclasses.replace(config, n_layers=1))
    big = bare_checkpoint(tmp_path / "big", config, moments=True)
    line = [sys.executable, "-c", MEASURE, *map(str, (small, big, tmp_path / "out", corpus))]
    # Tensors that are freed leave the process at once: else a later measurement hides in what an earlier one left.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    exporting, starting, loading = map(int, done.stdout.split())
    size = (tmp_path / "out" / "big" / "model.safetensors").stat().st_size
    assert size > 42e6
    peaks = {"export": exporting, "from_hf": starting, "loading whole": loading}
    print(f"weights {size / 1e6:.1f} MB; peak growth in MB:", {key: round(n / 1e6, 1) for key, n in peaks.items()})
    assert min(loading, starting) > 0.8 * size  # the measure sees a copy where there is one
    assert exporting < size / 3
    assert starting < 1.25 * size
