"""The deduplication experiment: what it plants, what it compares, and a whole small one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from lm.data.shards import load_manifest
from lm.errors import ConfigError
from recipes import bench_duplicates
from recipes.bench_duplicates import DEDUPLICATED, PLANTED, edited
from recipes.data import load_config
from recipes.paired import BETTER, OPEN, UNKNOWN, WORSE, paired

ARGUMENTS = ("--megabytes", "0.06", "--seeds", "2", "--d-model", "16", "--n-layers", "1")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Two sources of random sentences and their config."""
    rng = np.random.default_rng(0)
    words = [f"{a}{b}{c}" for a in "bdgklmnprst" for b in "aeiou" for c in ("n", "r", "st", "ll", "m")]
    sources = {}
    for name, size in (("long", 150), ("short", 60)):
        rows = [{"text": " ".join(rng.choice(words, size))} for _ in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources[name] = {"kind": "jsonl", "licence": "CC0", "data_files": str(tmp_path / f"{name}.jsonl")}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"sources": sources, "tokenizer": {"vocab_size": 300}}, sort_keys=False))
    return path


def test_a_copy_has_2_to_5_percent_of_its_words_replaced() -> None:
    rng = np.random.default_rng(1)
    text = "\n".join("one two, three (four) five" for _ in range(400))
    vocabulary = np.array(["new"], dtype=object)
    rates = [edited(text, vocabulary, rng).count("new") / 2000 for _ in range(100)]
    assert (
        0.01 < min(rates) < 0.025 and 0.045 < max(rates) < 0.065 and np.mean(rates) == pytest.approx(0.035, abs=0.003)
    )
    assert edited(text, vocabulary, rng).count("(") == 400  # all but words stays


def test_the_paired_interval_is_the_t_test() -> None:
    values = np.random.default_rng(0).normal(-0.1, 0.05, 5)
    found, expected = paired(list(enumerate(values))), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high)) and found.word == BETTER
    assert paired([(0, 1.0), (1, 1.1)]).word == WORSE and paired([(0, 1.0), (1, -1.1)]).word == OPEN
    assert paired([(0, 1.0)]).word == UNKNOWN


@pytest.mark.slow
def test_the_experiment(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench_duplicates.run(["--config", str(config), *ARGUMENTS])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result and "difference" in printed.err
    planted, deduplicated = (result["corpora"][name] for name in (PLANTED, DEDUPLICATED))
    copies = result["copies"]
    assert copies["all"] == copies["long"] + copies["short"]
    assert copies["all"] / planted["documents"] == pytest.approx(0.15, abs=0.005)
    dropped = planted["documents"] - deduplicated["documents"]
    assert 0.6 * copies["all"] <= dropped <= copies["all"]  # copies and nothing else; J of short ones is low
    assert result["tokens_a_run"] == sum(deduplicated["train_tokens"].values())
    losses = {(run["corpus"], run["seed"]): run["val_loss"] for run in result["runs"]}
    assert set(losses) == {(name, seed) for name in (PLANTED, DEDUPLICATED) for seed in (0, 1)}
    gaps = [losses[PLANTED, seed] - losses[DEDUPLICATED, seed] for seed in (0, 1)]
    found = result["differences"]["val_loss"]
    assert found["mean"] == pytest.approx(np.mean(gaps)) and found["low"] < found["mean"] < found["high"]
    assert {"bpb/long", "bpb/short"} <= set(result["differences"])


def test_both_corpora_hold_out_the_same_documents(config: Path, tmp_path: Path) -> None:
    options = bench_duplicates.build_parser().parse_args(["--config", str(config), *ARGUMENTS])
    counts = bench_duplicates.write_texts(tmp_path / "both" / "text", load_config(config)[0].sources, options)
    bench_duplicates.prepare_both(tmp_path / "both", list(counts), 300)
    manifests = [load_manifest(tmp_path / "both" / name) for name in (PLANTED, DEDUPLICATED)]
    sizes = [[m.split(name, "validation")["documents"] for name in ("long", "short")] for m in manifests]
    assert sizes[0] == sizes[1] and min(sizes[0]) > 3
    assert manifests[0].content["tokenizer_sha256"] == manifests[1].content["tokenizer_sha256"]
    with pytest.raises(ConfigError, match="--share must lie between 0 and 1"):
        bench_duplicates.run(["--share", "1"])
