"""The command line of recipes.data, and the loader benchmark."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from lm.data.files import DataError
from lm.data.synthetic import write_folder
from recipes import bench_loader
from recipes.data import load_config, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path) -> Path:
    rows = [f"document {i} about subject {i % 7} and nothing else, twice {i} \u2028 over" for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows))
    path = tmp_path / "config.yaml"
    settings = {
        "out": str(tmp_path / "out"),
        "sources": {"a": {"kind": "jsonl", "licence": "CC0", "data_files": str(tmp_path / "*.jsonl")}},
        "tokenizer": {"vocab_size": 280},
        "validation_fraction": 0.1,
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def edit(config: Path, **changes) -> None:
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **changes}))


def test_prepare_then_table(config, capsys) -> None:
    assert main(["prepare", "--config", str(config)]) == 0
    prepared = capsys.readouterr()
    assert "wrote" in prepared.err and prepared.out.split("\n")[0].split() == [
        "source", "documents", "unique", "tokens", "bytes/token", "weight", "tokens", "drawn", "epochs",
    ]  # fmt: skip
    assert main(["prepare", "--config", str(config)]) == 0
    assert "up to date (same config): nothing to do" in capsys.readouterr().err
    assert main(["table", "--dir", str(config.parent / "out"), "--tokens", "1_000_000", "--weights", "a=2"]) == 0
    table = capsys.readouterr()
    assert "1,000,000" in table.out and "warning: source 'a' is repeated" in table.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": {}}, "at least one source"),
        ({"sources": {"a": {"data_files": "x"}}}, "needs a kind"),
        ({"sources": {"a": {"kind": "jsonl", "data_files": "/nowhere/*"}}}, "no file matches /nowhere/*"),
        ({"sources": {"a": {"kind": "magic"}}}, "unknown kind 'magic'"),
        ({"tokenizer": {}}, "needs sources (a mapping by name) and tokenizer.vocab_size"),
        ({"tokenizer": {"vocab_size": "big"}}, "tokenizer.vocab_size in"),
        ({"tokenizer": {"vocab_size": 280.5}}, "tokenizer.vocab_size in"),
        ({"shard_tokens": 1.5}, "must be a whole number, got 1.5"),
        ({"tokenizer": {"vocab_size": 100}}, "vocab_size must be 257 to 200,000"),
        ({"tokenizer": {"vocab_size": 100_000}}, "enough distinct pairs for a vocabulary of"),
        ({"validation": 0.1}, "has unknown keys validation"),
        ({"validation_fraction": 2}, "validation_fraction must lie between 0 and 1"),
        ({"out": None}, "names no out; pass --out DIR"),
    ],
)
def test_bad_configs_are_one_line_and_exit_2(config, capsys, changes, message) -> None:
    edit(config, **changes)
    assert main(["prepare", "--config", str(config)]) == 2
    error = capsys.readouterr().err.strip().split("\n")
    assert error[-1].startswith("error: ") and message in error[-1]
    assert not (config.parent / "out").exists()


def test_existing_output_of_another_config(config, capsys) -> None:
    assert main(["prepare", "--config", str(config)]) == 0
    edit(config, tokenizer={"vocab_size": 270})
    assert main(["prepare", "--config", str(config)]) == 2
    assert "pass --overwrite to replace it or choose another --out" in capsys.readouterr().err
    assert main(["prepare", "--config", str(config), "--overwrite"]) == 0


def test_table_errors(tmp_path, config, capsys) -> None:
    assert main(["table", "--dir", str(tmp_path / "none")]) == 2
    assert "is not a prepared data folder" in capsys.readouterr().err
    main(["prepare", "--config", str(config)])
    for weights, message in (
        ("b=1", "unknown source 'b'"),
        ("a:1", "--weights takes name=number"),
        ("a=1, a=2", "--weights names 'a' twice"),
        ("{a: 1, a: 2}", "found duplicate key a"),
    ):
        assert main(["table", "--dir", str(tmp_path / "out"), "--weights", weights]) == 2
        assert message in capsys.readouterr().err


def test_a_damaged_shard_is_found(config, capsys) -> None:
    """By `verify` always; in training as soon as an id lies beyond the vocabulary."""
    from lm.data.shards import load_manifest
    from lm.data.windows import WindowReader

    out = config.parent / "out"
    assert main(["prepare", "--config", str(config)]) == 0
    capsys.readouterr()
    assert main(["verify", "--dir", str(out)]) == 0
    assert "all as the manifest says" in capsys.readouterr().out
    shard = out / "a" / "train" / "shard-00000.bin"
    ids = np.fromfile(shard, dtype="<u2")
    ids[40] = 0xFFFF
    ids.tofile(shard)
    assert main(["verify", "--dir", str(out)]) == 2
    assert f"error: {shard} is not what was prepared" in capsys.readouterr().err
    reader = WindowReader(load_manifest(out), "train", ["a"])
    reader.batch(np.array([0]), np.array([0]), 32)
    with pytest.raises(DataError, match="holds the id 65535, its vocabulary ends at 279"):
        reader.batch(np.array([0]), np.array([1]), 32)


def test_missing_and_broken_config(tmp_path, capsys) -> None:
    assert main(["prepare", "--config", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2")
    assert main(["prepare", "--config", str(tmp_path / "bad.yaml")]) == 2
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 2 and "does not exist; examples are in conf/data/" in lines[0] and "not valid YAML" in lines[1]


@pytest.mark.parametrize("arguments", [["--help"], ["prepare", "--help"], ["table", "--help"], ["verify", "--help"]])
def test_help_has_examples(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "Examples:\n  python -m recipes.data prepare --config conf/data/demo.yaml" in capsys.readouterr().out


def test_shipped_configs_are_valid() -> None:
    for path in sorted((ROOT / "conf" / "data").glob("*.yaml")):
        config, out = load_config(path)
        assert out is not None and out.startswith("data/") and config.sources


def test_loader_benchmark_reports_tokens_per_second(capsys) -> None:
    result = bench_loader.run(["--seconds", "0.2", "--repeats", "3"])
    assert json.loads(capsys.readouterr().out) == result
    assert result["tokens_per_s"] > 1_000_000  # a loose floor: the machine may be busy


@pytest.mark.slow
def test_demo_corpus(tmp_path, capsys) -> None:
    """Each source 5 to 60 MB after exact dedup, validation long enough for 900 windows of 128."""
    assert main(["prepare", "--config", str(ROOT / "conf/data/demo.yaml"), "--out", str(tmp_path / "demo")]) == 0
    manifest = json.loads((tmp_path / "demo" / "manifest.json").read_text())
    assert list(manifest["sources"]) == ["prose", "reference", "code"] and manifest["dtype"] == "<u2"
    for source in manifest["sources"].values():
        assert 5e6 < sum(source["report"]["kept_bytes"].values()) < 60e6
        assert source["splits"]["validation"]["tokens"] > 900 * 128
        assert source["licence"] != "not stated"


def test_table_of_a_runs_config_has_every_stage(tmp_path, capsys) -> None:
    """Stages of the config and of a callback, a rule, both as JSON and as text; the numbers are the plan's."""
    rng = np.random.default_rng(0)
    documents = {
        name: [np.append(rng.integers(1, 300, 49), 0) for _ in range(n)]
        for name, n in (("prose", 400), ("code", 200), ("reference", 80))
    }
    write_folder(tmp_path / "data", {name: {"train": d, "validation": d} for name, d in documents.items()}, 300)
    anneal = {"class_path": "plugins.callbacks.wsd_anneal.WSDAnneal", "init_args": {"weights": {"code": 1}}}
    settings = {
        "tokens": 12_800,
        "model": {
            "config": {"vocab_size": 300, "d_model": 16, "n_layers": 1, "n_heads": 2},
            "optim": {"schedule": {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.25}},
        },
        "data": {
            "dir": str(tmp_path / "data"),
            "sequence_length": 16,
            "global_batch_tokens": 128,
            "weights": {"unimax": {"max_epochs": 1}},
        },
        "trainer": {"devices": 64, "strategy": "fsdp", "callbacks": [anneal]},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["table", "--config", str(tmp_path / "run.yaml"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # 75 of 100 steps, 9,600 tokens, under unimax: all 4,000 of reference fit above its even part of 3,200.
    assert [(row["stage"], row["source"]) for row in found["stages"]] == [
        (0, "prose"), (0, "code"), (0, "reference"), (1, "code"),
    ]  # fmt: skip
    assert [row["tokens_drawn"] for row in found["stages"]] == pytest.approx([3200] * 3 + [3200], rel=0.01)
    assert [row["epochs"] for row in found["stages"]] == pytest.approx([0.16, 0.32, 0.8, 0.32], rel=0.01)
    assert [row["unique_tokens"] for row in found["sources"]] == [20_000, 10_000, 4_000]
    assert [row["documents"] for row in found["sources"]] == [400, 200, 80]
    assert found["sources"][1]["epochs"] == pytest.approx(0.64, rel=0.01) and found["warnings"] == []
    assert found["rules"][0]["rule"] == {"kind": "unimax", "value": 1.0, "sources": []}
    assert main(["table", "--config", str(tmp_path / "run.yaml"), "--tokens", "25_600"]) == 0
    text = capsys.readouterr().out
    assert "weights from step 0 on, by unimax, max_epochs 1: " in text and "not reached" not in text
    assert main(["table", "--config", str(tmp_path / "run.yaml"), "--tokens", "1e6"]) == 2
    assert "unimax with max_epochs 1 has 34,000 tokens to give" in capsys.readouterr().err


def test_table_takes_rules_and_says_what_is_missing(config, capsys) -> None:
    assert main(["prepare", "--config", str(config)]) == 0
    out = str(config.parent / "out")
    capsys.readouterr()
    for weights in ("temperature=2", "{unimax: {max_epochs: 9}, sources: [a]}"):
        assert main(["table", "--dir", out, "--weights", weights, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["stages"]
        assert row["weight"] == 1 and row["epochs"] == pytest.approx(1, rel=1e-3)
    assert main(["table"]) == 2 and "table needs --dir" in capsys.readouterr().err
    assert main(["table", "--dir", out, "--weights", "{a: [}"]) == 2
    assert "--weights is not YAML" in capsys.readouterr().err
    assert main(["table", "--dir", out, "--weights", ""]) == 2
    capsys.readouterr()
    assert main(["table", "--dir", out, "--packing", "best_fit", "--sequence-length", "64", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["sources"]:  # one pass: over all tokens, padding aside
        assert row["epochs"] == pytest.approx(1, rel=5e-3)
