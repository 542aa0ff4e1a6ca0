"""What a forward pass keeps is what lm.planner derives, tensor by tensor."""

from __future__ import annotations

import pytest

from lm.planner.layout import CHECKPOINTING
from recipes import bench_activations


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("name", bench_activations.NUMERICS)
def test_kept_bytes_are_within_2_percent_of_the_prediction(name: str, checkpointing: str) -> None:
    arguments = ["--d-model", "128", "--n-layers", "3", "--vocab-size", "515", "--sequence-length", "160", "--qk-norm"]
    options = bench_activations.build_parser().parse_args(arguments)
    row = bench_activations.row(options, name, checkpointing)
    assert row["measured_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.02), row
