"""What a rank really holds is what lm.plan says."""

from __future__ import annotations

from typing import Any

import pytest

from lm.plan import MEMORY_STRATEGIES, memory_bytes
from recipes import bench_memory
from recipes.bench_ranks import write_data
from tests.distributed import harness
from tests.distributed.scenario import quiet

OPTIONS = ["--d-model", "96", "--n-layers", "3", "--vocab-size", "515"]


def measure(arguments: list[str]) -> dict[str, dict[str, int]]:
    quiet()
    options = bench_memory.build_parser().parse_args(arguments)
    return {strategy: bench_memory.train_and_measure(options, strategy) for strategy in MEMORY_STRATEGIES}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("memory")
    arguments = [*OPTIONS, "--folder", str(folder)]
    options = bench_memory.build_parser().parse_args(arguments)
    write_data(options, folder)
    ranks = harness.run(measure, options.processes, arguments)
    return {name: bench_memory.compare(options, name, [rank[name] for rank in ranks]) for name in MEMORY_STRATEGIES}


@pytest.mark.parametrize("strategy", MEMORY_STRATEGIES)
def test_measured_bytes_are_within_5_percent_of_the_prediction(rows, strategy: str) -> None:
    measured, predicted = rows[strategy]["measured_bytes"], rows[strategy]["predicted_bytes"]
    for kind in bench_memory.KINDS:
        assert measured[kind] == pytest.approx(predicted[kind], rel=0.05), kind


def test_what_is_cut_takes_less(rows) -> None:
    held = {name: row["measured_bytes"] for name, row in rows.items()}
    assert held["fsdp"]["parameters"] < 0.3 * held["ddp"]["parameters"]
    assert 0.45 < held["hsdp"]["gradients"] / held["ddp"]["gradients"] < 0.55
    assert held["zero1"]["optimizer_state"] < 0.3 * held["ddp"]["optimizer_state"]
    assert held["zero3"]["gradients"] < 0.3 * held["ddp"]["gradients"]


def test_wrong_sizes_are_refused() -> None:
    config = bench_memory.model_config(bench_memory.build_parser().parse_args(OPTIONS))
    with pytest.raises(ValueError, match="unknown strategy 'fsdp3'"):
        memory_bytes(config, "fsdp3", 4)
    with pytest.raises(ValueError, match="shard divide world_size"):
        memory_bytes(config, "hsdp", 4, shard=3)
