"""Dashboard, integrity and samples under every strategy, in one launch each: the same as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import harness
from tests.distributed.dashboard_jobs import Flip, corrupt_each, skipped, slow, watch, write_data
from tests.distributed.scenario import LAYOUTS, SINGLE, TENSOR_LAYOUTS, Layout

BY_NAME = {layout.name: layout for layout in [*LAYOUTS, *TENSOR_LAYOUTS]}
WITH_MUON = ("fsdp-2", "zero2-2")
OF_THE_MACHINE = ("step_seconds", "work_seconds", "memory_gb")
NAMES = ["ddp-2", "fsdp-2", "zero2-2"]
SLOW_NAMES = ["hsdp-4", "zero1-2", "zero3-2", "fsdp-4", "tp2", "fsdp2_tp2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("dashboard") / "data")


@pytest.fixture(scope="module")
def single(data: Path) -> dict[str, Any]:
    return harness.run(watch, 1, SINGLE, data, data.parent / "single", muon=True)[0]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_NAMES)])
def test_every_layout_sees_what_one_process_sees(single: dict, data: Path, name: str) -> None:
    layout: Layout = BY_NAME[name]
    ranks = harness.run(watch, layout.world_size, layout, data, data.parent / name, muon=name in WITH_MUON)
    for kind in ("adamw", *(["muon"] if name in WITH_MUON else [])):
        wanted = {key: points for key, points in single[kind].items() if key.split("/")[0] not in OF_THE_MACHINE}
        assert len(wanted) > 20
        for key, points in wanted.items():
            assert ranks[0][kind][key] == [(step, pytest.approx(value, rel=1e-4)) for step, value in points], key
    for rank in ranks:
        assert rank["same"], "training changed because somebody looked"
        assert rank["same_random_state"]
        assert rank["adamw"] == ranks[0]["adamw"]  # all ranks keep the history: a guard may ask any
        assert rank["checks"] == 4  # and none of them raised
        assert rank["texts"] == single["texts"]
        for (step, found), (at, wanted) in zip(rank["scores"], single["scores"], strict=True):
            assert step == at and found == pytest.approx(wanted, rel=1e-5)
        for index in range(layout.world_size):
            assert all(seconds > 0 for _, seconds in rank["adamw"][f"step_seconds/rank_{index}"])


def test_one_process_is_not_disturbed(single: dict) -> None:
    assert single["same"] and single["same_random_state"]
    assert sorted(single["texts"]) == ["step-00000003.txt", "step-00000004.txt"]
    assert [step for step, _ in single["adamw"]["log_z"]] == [2, 4]
    (first, before), (last, after) = single["scores"]
    assert (first, last) == (2, 4) and before.keys() == after.keys() == {
        "eval_bpb/text", "eval_loss/text", "answer_nats_per_byte/asked", "exact_match/asked"
    }  # fmt: skip
    assert after["eval_loss/text"] < before["eval_loss/text"]


def test_a_skipped_step(data: Path) -> None:
    """Its gradients are shown, its update is 0, and the steps around it are whole."""
    history = harness.run(skipped, 2, BY_NAME["zero2-2"], data)[0]
    assert history["skipped_fraction"] == [(1, 0.0), (2, 1.0), (3, 0.0)]
    assert [value > 0 for _, value in history["update_ratio/block_00"]] == [True, False, True]
    assert all(value > 0.01 for _, value in history["grad_norm/block_00"])
    assert [step for step, _ in history["eps_ratio"]] == [1, 3]


def test_a_slow_rank_is_named(data: Path) -> None:
    """Although the other rank takes as long, waiting for its parameters."""
    said = harness.run(slow, 2, BY_NAME["fsdp-2"], data)[0]
    assert [line.split(" on ")[0] for line in said] == ["dashboard: rank 1"] * 2


WQ = "model.blocks.1.attention.wq.weight"


NORM = "model.norm.weight"
FLIPS = [
    (BY_NAME["ddp-2"], [(Flip(2, 1, WQ), f"ranks 0 and 1 hold different bits, one of them is wrong, in param/{WQ} ")]),
    (
        Layout("ddp", 4),
        [
            (Flip(2, 2, WQ), f"rank 2 holds other bits than ranks 0, 1 and 3 in param/{WQ} "),
            (
                Flip(1, 3, NORM, "exp_avg_sq"),
                f"rank 3 holds other bits than ranks 0, 1 and 2 in optim/{NORM}/exp_avg_sq",
            ),
        ],
    ),
    (
        BY_NAME["hsdp-4"],
        [(Flip(2, 3, WQ), f"ranks 1 and 3 hold different bits, one of them is wrong, in param/{WQ} ")],
    ),
    (BY_NAME["zero1-2"], [(Flip(2, 1, WQ), "rank 1 on"), (Flip(2, 1, NORM), f"param/{NORM} ")]),
    (BY_NAME["zero3-2"], [(Flip(2, 1, NORM), f" in param/{NORM} ")]),
]


@pytest.mark.parametrize(
    ("layout", "flips"),
    [*FLIPS[:-1], pytest.param(*FLIPS[-1], marks=pytest.mark.slow)],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_a_flipped_bit_is_found_and_never_saved(data: Path, tmp_path: Path, layout: Layout, flips: list) -> None:
    """It flips just before the save of its step, which finds it whatever the interval of the checks."""
    results = harness.run(corrupt_each, layout.world_size, layout, data, tmp_path, [flip for flip, _ in flips])
    for rank in results:
        for result, (flip, words) in zip(rank, flips, strict=True):
            assert words in result["error"]
            assert f"at step {flip.step} " in result["error"] and "\n" not in result["error"]
            assert result["saved"] == ["step-00000001"][: flip.step - 1]
