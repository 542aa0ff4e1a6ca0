"""Windows spread over processes compute what one process does, with every strategy of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lm.context_parallel import check_heads, check_length
from lm.errors import ConfigError
from plugins.strategies.context_parallel import window_ranks
from plugins.strategies.ddp import DDP
from plugins.strategies.fsdp import FSDP
from tests.distributed import context_jobs as jobs
from tests.distributed import harness
from tests.distributed.context_jobs import CONFIG, MAX_SCORE, SAVED_STEP, STEPS, T, assert_same
from tests.distributed.scenario import SINGLE, Layout

CONTEXT = {"context_parallel": 2}
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("fsdp", 2, CONTEXT, "cp2"),
        Layout("fsdp", 4, CONTEXT, "fsdp2_cp2"),
        Layout("fsdp", 4, {**CONTEXT, "tensor_parallel": 2}, "cp2_tp2"),
        Layout("ddp", 2, CONTEXT, "ddp_cp2"),
        Layout("hsdp", 4, {**CONTEXT, "replicate": 2}, "hsdp_cp2"),
        Layout("zero", 2, {**CONTEXT, "stage": 2}, "zero2_cp2"),
        Layout("zero", 2, {**CONTEXT, "stage": 1}, "zero1_cp2"),
        Layout("zero", 2, {**CONTEXT, "stage": 3}, "zero3_cp2"),
    )
}
FROM_START = {"cp2": jobs.whole_runs, "fsdp2_cp2": jobs.whole_run, "ddp_cp2": jobs.whole_run}
SOURCES = {"fsdp2_cp2": "cp2", "cp2_tp2": "cp2"}  # whose checkpoint each continues; single-1 for the others


class Runs:
    """Results by layout, made once; each leaves a checkpoint of step SAVED_STEP in the folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        jobs.write_data(folder / "data")
        self.made: dict[str, list[dict[str, Any]]] = {}

    def ranks(self, name: str) -> list[dict[str, Any]]:
        if name not in self.made:
            if name == SINGLE.name:
                self.made[name] = harness.run(jobs.whole_runs, 1, SINGLE, self.folder)
            else:
                layout, source = LAYOUTS[name], SOURCES.get(name, SINGLE.name)
                self.ranks(source)
                self.made[name] = harness.run(
                    jobs.spread_runs, layout.world_size, layout, self.folder, source, FROM_START.get(name)
                )
        return self.made[name]

    def reference(self) -> dict[str, Any]:
        return self.ranks(SINGLE.name)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("name", FROM_START)
def test_a_run_equals_one_process(runs: Runs, name: str) -> None:
    """Losses, gradient norms, tokens, scores under QK-clip, validation losses by source: 20 steps with clipping."""
    reference = runs.reference()["whole"]
    losses = [row["loss"] for row in reference if "loss" in row]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.01
    scores = [row["max_attention_score"] for row in reference if "max_attention_score" in row]
    assert scores[0] > 1.5 * MAX_SCORE > max(scores[1:]) > MAX_SCORE
    assert {"grad_norm", "tokens", "val_loss/one", "bpb/two"} <= {key for row in reference for key in row}
    for rank in runs.ranks(name):
        assert_same(rank["whole"], reference)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("zero1_cp2", "zero3_cp2") else []) for name in LAYOUTS],
)
def test_a_run_continues_from_another_layout(runs: Runs, name: str) -> None:
    reference = runs.reference()["whole"]
    for rank in runs.ranks(name):
        assert sum("loss" in row for row in rank["resumed"]) == STEPS - SAVED_STEP
        assert_same(rank["resumed"], reference[-len(rank["resumed"]) :])


def test_one_process_continues_a_spread_run(runs: Runs) -> None:
    runs.ranks("cp2")
    (rows,) = harness.run(jobs.resumed_run, 1, SINGLE, runs.folder, "cp2")
    assert_same(rows, runs.reference()["whole"][-len(rows) :])
    assert sum("loss" in row for row in rows) == STEPS - SAVED_STEP


@pytest.mark.parametrize("variant", ["stabilised", "tied"])
def test_model_options_and_recomputation(runs: Runs, variant: str) -> None:
    """One key-value head for two processes, QK-norm, caps, full recomputation; tied, selective, by documents."""
    for rank in runs.ranks("cp2"):
        assert_same(rank[variant], runs.reference()[variant])


def test_packed_windows_with_padding(runs: Runs) -> None:
    """One document a window and padding behind it: the parts of some windows hold no label."""
    reference = runs.reference()["packed"]
    tokens = [row["tokens"] for row in reference if "tokens" in row]
    whole = [row["tokens"] for row in runs.reference()["whole"] if "tokens" in row]
    assert len(tokens) == 4 and all(0.5 * b < a < 0.95 * b for a, b in zip(tokens, whole, strict=False))
    for rank in runs.ranks("cp2"):
        assert_same(rank["packed"], reference)


def test_bf16_follows(runs: Runs) -> None:
    reference = runs.reference()
    for rank in runs.ranks("cp2"):
        assert rank["bf16"] != reference["whole"][: len(rank["bf16"])]
        assert_same(rank["bf16"], reference["bf16"], tolerance=1e-2)


@pytest.mark.parametrize("name", ["cp2", "ddp_cp2", "cp2_tp2"])
def test_activations_outside_attention_are_a_part_of_the_window(runs: Runs, name: str) -> None:
    for rank in runs.ranks(name):
        assert set(rank["shapes"]) == {"block", "wq", "mlp", "wo"}
        for shapes in rank["shapes"].values():
            assert shapes == (2, T // 2, 2, T // 2)


@pytest.mark.parametrize("n", [2, 4])
def test_attention_over_an_exchange_in_fp64(n: int) -> None:
    for differences in harness.run(jobs.attention_differences, n):
        assert len(differences) == 12
        assert max(differences.values()) < 1e-12, differences


def test_the_exchange_moves_bits() -> None:
    assert harness.run(jobs.exchanged_bits, 2) == [[True] * 4] * 2


def test_logits_losses_and_gradients_equal_the_whole_model() -> None:
    for by_model in harness.run(jobs.model_differences, 2):
        for differences in by_model.values():
            kept = differences.pop("kept share")
            assert 0.45 < kept < 0.6  # of the bytes kept for backward; masks and token ids are whole
            assert len(differences) > 20
            assert max(differences.values()) < 1e-5, differences


@pytest.mark.slow
def test_a_long_window(tmp_path: Path) -> None:
    data = jobs.write_data(tmp_path / "data", 30_000, mean_length=3000)
    (reference,) = harness.run(jobs.long_window, 1, SINGLE, data)
    for rows in harness.run(jobs.long_window, 2, LAYOUTS["cp2"], data):
        assert_same(rows, reference)


def test_ranks_that_share_windows_are_neighbours() -> None:
    assert window_ranks(4, 2) == [[0, 1], [2, 3]]
    assert window_ranks(8, 2, tensor_parallel=2) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_what_does_not_divide_is_refused_in_one_line(tmp_path: Path) -> None:
    for strategy in (FSDP, DDP):
        with pytest.raises(ConfigError, match="context_parallel must be at least 1, got 0"):
            strategy(context_parallel=0)
    check_heads(CONFIG, 2)
    check_heads(CONFIG, 4)
    with pytest.raises(ConfigError, match=r"n_heads 4 does not divide by context_parallel 3"):
        check_heads(CONFIG, 3)
    with pytest.raises(ConfigError, match=r"n_heads 4 / tensor_parallel 2 does not divide by context_parallel 4"):
        check_heads(CONFIG, 4, tensor_parallel=2)
    six = jobs.ModelConfig(vocab_size=9, d_model=24, n_layers=1, n_heads=12, n_kv_heads=6)
    with pytest.raises(ConfigError, match=r"n_kv_heads 6 neither divides by context_parallel 4 nor divides it"):
        check_heads(six, 4)
    with pytest.raises(ConfigError, match=r"sequence_length 33 does not divide by context_parallel 2"):
        check_length(33, 2)
    data = jobs.write_data(tmp_path / "data")
    with pytest.raises(ConfigError, match="fsdp context_parallel 2 does not divide the 1 devices"):
        jobs.recipe_run(Layout("fsdp", 1, CONTEXT), data)


def test_windows_that_do_not_divide_are_refused_before_training(tmp_path: Path) -> None:
    data = jobs.write_data(tmp_path / "data")
    for said in harness.run(jobs.refusal, 2, LAYOUTS["cp2"], data, length=33):
        assert said == "sequence_length 33 does not divide by context_parallel 2; change one of them"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices for NCCL")
def test_the_exchange_over_nccl() -> None:
    assert harness.run(jobs.exchanged_bits, 2, "cuda") == [[True] * 4] * 2
