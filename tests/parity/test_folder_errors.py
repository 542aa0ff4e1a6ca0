"""What cannot be read or written is refused in one line that says what and where."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.hf import check_exportable, from_hf_config, hf_name, parameter_shapes, to_hf_config
from lm.hf_weights import HFWeights, read_hf_config, write_weights
from lm.model import Llama
from lm.rope_scaling import RopeScaling
from tests.parity.helpers import make, save_hf

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=1, n_heads=2)
VALUES = to_hf_config(CONFIG, 128, 0, "float32")


def one_line(error: pytest.ExceptionInfo, *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ["qwen3", "LlamaForCausalLM"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_dropout": 0.1}, ["attention_dropout"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_size": 33, "head_dim": None}, ["33", "n_heads"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, ["longrope"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, ["truncate"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}}, ["partial"]),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096}, ["sliding"]),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, ["sliding_window"]),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        from_hf_config({**VALUES, **changes}, "DIR/config.json")
    one_line(error, "DIR/config.json", *words)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ConfigError) as error:
        from_hf_config({key: value for key, value in VALUES.items() if key != "hidden_size"}, "DIR/config.json")
    one_line(error, "hidden_size")


def test_mistral_without_a_window_is_a_llama() -> None:
    mistral = {**VALUES, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert from_hf_config(mistral, "x") == from_hf_config(VALUES, "x") == CONFIG


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"qk_norm": True}, "qk_norm"),
        ({"attention_softcap": 50.0}, "attention_softcap"),
        ({"final_softcap": 30.0}, "final_softcap"),
        ({"n_heads": 3, "d_head": 16}, "divide"),
    ],
)
def test_what_llama_cannot_express(changes: dict, word: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_exportable(dataclasses.replace(CONFIG, n_kv_heads=0, **changes))
    one_line(error, word)


def test_every_parameter_has_a_name_and_a_shape() -> None:
    for tied in (False, True):
        config = dataclasses.replace(CONFIG, tie_embeddings=tied, n_kv_heads=1, n_layers=3)
        with torch.device("meta"):
            parameters = {name: tuple(p.shape) for name, p in Llama(config).named_parameters()}
        assert parameter_shapes(config) == parameters
        assert len({hf_name(name) for name in parameters}) == len(parameters)
    with pytest.raises(ConfigError, match=r"attention\.q_norm\.weight"):
        hf_name("blocks.0.attention.q_norm.weight")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(make(CONFIG), tmp_path, max_shard_bytes=8000)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    """The same folder with its tensors changed, in one file."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("model*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_tensors_that_do_not_fit(folder: Path) -> None:
    def add_bias(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)

    rewrite(folder, add_bias)
    with pytest.raises(ConfigError) as error:
        HFWeights(folder)
    one_line(error, str(folder), "q_proj.bias")


def test_missing_tensors_and_files(folder: Path) -> None:
    last = sorted(folder.glob("model-*.safetensors"))[-1]
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(ConfigError) as error:
        HFWeights(folder)
    one_line(error, last.name)
    last.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ConfigError) as error:
        HFWeights(folder)
    one_line(error, last.name, "cannot be read")
    last.write_bytes(kept)
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ConfigError) as error:
        HFWeights(folder)
    one_line(error, "model.norm.weight")


def test_a_shape_that_differs(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "intermediate_size": 80}))
    with pytest.raises(ConfigError) as error:
        HFWeights(folder)
    one_line(error, "gate_proj", "96", "80")


def test_no_folder_and_no_weights(folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_hf_config(folder / "nowhere")
    one_line(error, "nowhere", "no Hugging Face model folder")
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(ConfigError) as error:
        HFWeights(folder)
    one_line(error, "safetensors")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError) as error:
        read_hf_config(folder)
    one_line(error, "config.json")


def test_another_config_names_the_field(folder: Path) -> None:
    scaled = dataclasses.replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0))
    for config, word in [
        (dataclasses.replace(CONFIG, rope_theta=20_000.0), "rope_theta is 20000.0"),
        (dataclasses.replace(CONFIG, qk_norm=True), "qk_norm"),
        (scaled, "rope_scaling"),
    ]:
        with pytest.raises(ConfigError) as error:
            HFWeights(folder, config)
        one_line(error, str(folder), word)
    HFWeights(folder, dataclasses.replace(CONFIG, init_std=0.5, zero_init_head=True))  # the run's own


def test_old_folders_hold_tables_and_tied_heads(tmp_path: Path) -> None:
    save_hf(make(dataclasses.replace(CONFIG, tie_embeddings=True)), tmp_path, max_shard_bytes=8000)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = torch.zeros(64, 32)

    rewrite(tmp_path, add)
    HFWeights(tmp_path)


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    """The library's own reader agrees on names, shapes, dtype and bits; sizes of files stay below the limit."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(3 + i, 5, generator=generator) for i in range(6)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        files = write_weights(folder, shapes, tensors.__getitem__, dtype, max_shard_bytes=200)
        found: dict[str, torch.Tensor] = {}
        for file in files:
            loaded = load_file(folder / file)
            assert len(loaded) == 1 or sum(t.nbytes for t in loaded.values()) <= 200
            found |= loaded
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name].to(dtype)) for name in tensors)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        assert set(index["weight_map"].values()) == set(files)
