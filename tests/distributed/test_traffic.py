"""What a rank really sends in a step is what lm.planner says, for every strategy and every way to cut a batch."""

from __future__ import annotations

from typing import Any

import pytest

from recipes import bench_traffic
from recipes.bench_ranks import write_data
from tests.distributed import harness
from tests.distributed.scenario import quiet

# The MLP's matrices are above the 100,000 elements below which ZeRO-3 keeps parameters whole.
OPTIONS = ["--d-model", "256", "--n-layers", "2", "--vocab-size", "515"]
EACH = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "fsdp_tensor", "fsdp_context")
OTHERS = tuple(name for name in bench_traffic.LAYOUTS if name not in EACH)
MIXED = ("ddp", "fsdp_every", "fsdp_tensor", "fsdp_context", "zero3")


def measure(arguments: list[str]) -> dict[str, dict[str, float]]:
    quiet()
    options = bench_traffic.build_parser().parse_args(arguments)
    return {name: bench_traffic.train_and_count(options, name) for name in options.layouts}


def measured_rows(folder: Any, extra: list[str]) -> dict[str, dict[str, Any]]:
    arguments = [*OPTIONS, "--folder", str(folder), *extra]
    options = bench_traffic.build_parser().parse_args(arguments)
    write_data(options, folder)
    ranks = harness.run(measure, options.processes, arguments)
    return {name: bench_traffic.compare(options, name, [rank[name] for rank in ranks]) for name in options.layouts}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return measured_rows(tmp_path_factory.mktemp("traffic"), ["--layouts", *EACH])


@pytest.fixture(scope="module")
def other_rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return measured_rows(tmp_path_factory.mktemp("others"), ["--layouts", *OTHERS])


@pytest.fixture(scope="module")
def mixed_rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return measured_rows(tmp_path_factory.mktemp("mixed"), ["--precision", "bf16-mixed", "--layouts", *MIXED])


def check(row: dict[str, Any]) -> None:
    assert set(row["counted"]) >= set(row["predicted"]), row
    for kind, sent in row["predicted"].items():
        assert row["counted"][kind] == pytest.approx(sent, rel=0.02), (kind, row)
    assert abs(row["difference"]) < 0.02, row


@pytest.mark.parametrize("name", EACH)
def test_counted_bytes_are_within_2_percent_of_the_prediction(rows, name: str) -> None:
    check(rows[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_cut_a_batch(other_rows, name: str) -> None:
    check(other_rows[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_also_under_bf16(mixed_rows, name: str) -> None:
    check(mixed_rows[name])
