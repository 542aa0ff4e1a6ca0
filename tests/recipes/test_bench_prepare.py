"""The benchmarks of preparing data print what they say, and memory stays bounded."""

import json

import pytest

from lm.errors import ConfigError
from recipes import bench_prepare, bench_tokenize


def test_memory_of_a_small_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--megabytes", "0.3", "--document", "1.5", "--sample-bytes", "2e5", "--vocab-size", "300"]
    bench_prepare.run([*sizes, "--workers", "1"])
    result = json.loads(capsys.readouterr().out)
    (row,) = result["sizes"]
    assert row["documents"] > 50 and 30 < row["peak_mb"] < 600 and result["growth"] == 1
    assert 1.7e6 / 4 < row["tokens"] < 1.9e6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_document_of_100_megabytes_stays_within_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    bench_prepare.run(["--megabytes", "1", "--document", "100", "--sample-bytes", "1e6", "--vocab-size", "1000"])
    (row,) = json.loads(capsys.readouterr().out)["sizes"]
    assert row["tokens"] > 2e7 and row["peak_mb"] < 1500


@pytest.mark.slow
def test_tokens_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    bench_tokenize.run(["--bytes", "3e5", "--rounds", "1", "--vocab-size", "400", "--workers", "2"])
    result = json.loads(capsys.readouterr().out)
    assert set(result["tokens_per_s"]) == {"1", "2"} and min(result["tokens_per_s"].values()) > 0
    assert result["tokens_per_cpu_s"] > result["tokenizers_per_cpu_s"]
    with pytest.raises(ConfigError, match="too few for 2 parts"):
        bench_tokenize.run(["--bytes", "1e10", "--rounds", "1"])
