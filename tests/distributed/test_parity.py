"""Every strategy trains the same model to the same losses, alone and after any change of strategy."""

from __future__ import annotations

import itertools

import pytest

from plugins.strategies import checkpoint
from tests.distributed import harness, jobs
from tests.distributed.jobs import SAVED_STEP, SKIPPED, STEPS
from tests.distributed.scenario import CLIP, LAYOUTS, SINGLE, TENSOR_LAYOUTS, Layout, Model, build_trainer, fit

ALL = [*LAYOUTS, *TENSOR_LAYOUTS]
BY_NAME = {layout.name: layout for layout in ALL}
EVERY = pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
OTHERS = pytest.mark.parametrize("layout", ALL[1:], ids=lambda layout: layout.name)

# Each layout once as source and once as target.
CROSSINGS = [
    ("fsdp-2", "zero2-2"),
    ("zero3-2", "ddp-2"),
    ("hsdp-4", "single-1"),
    ("single-1", "fsdp-4"),
    ("ddp-2", "zero3-2"),
    ("zero1-2", "hsdp-4"),
    ("zero2-2", "fsdp-2"),
    ("fsdp-4", "zero1-2"),
    ("fsdp2_tp2", "fsdp-2"),
    ("zero3-2", "fsdp2_tp2"),
    ("hsdp-4", "tp2"),
    ("tp2", "fsdp2_tp2"),
]


def assert_close(got: list[float], wanted: list[float], tolerance: float = 1e-5) -> None:
    assert len(got) == len(wanted)
    assert got == pytest.approx(wanted, rel=tolerance)


@OTHERS
def test_losses_and_norms_equal_one_process(runs, layout: Layout) -> None:
    whole, reference = runs.result(layout)["whole"], runs.result(SINGLE)["whole"]
    assert len(reference["losses"]) == STEPS
    assert reference["losses"][0] != pytest.approx(reference["losses"][-1], rel=1e-3)
    assert min(reference["norms"]) > CLIP  # clipping takes part in every step
    assert_close(whole["losses"], reference["losses"])
    assert_close(whole["norms"], reference["norms"])
    assert len(reference["validation"]) == STEPS // SAVED_STEP
    assert whole["shapes"] == reference["shapes"]


def test_clipping_is_what_the_parity_tests_see(runs) -> None:
    clipped = runs.result(SINGLE)["whole"]
    free = fit(build_trainer(SINGLE, 6, gradient_clip_val=None), Model())
    assert free.norms[0] == clipped["norms"][0]
    assert max(abs(a / b - 1) for a, b in zip(free.losses, clipped["losses"][:6], strict=True)) > 1e-4


@EVERY
def test_every_rank_reports_the_same(runs, layout: Layout) -> None:
    for rank in runs.ranks(layout)[1:]:
        for part in ("whole", "resumed", "skip"):
            assert rank[part]["norms"] == runs.result(layout)[part]["norms"]
            assert rank[part]["losses"] == runs.result(layout)[part]["losses"]


@EVERY
def test_resume_continues_the_same_run(runs, layout: Layout) -> None:
    whole, resumed = runs.result(layout)["whole"], runs.result(layout)["resumed"]
    assert len(resumed["losses"]) == STEPS - SAVED_STEP
    assert_close(resumed["losses"], whole["losses"][SAVED_STEP:])
    assert_close(resumed["norms"], whole["norms"][SAVED_STEP:])


@pytest.mark.timeout(900)  # alone, it makes the checkpoints of all layouts
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resume_under_another_strategy(runs, world_size: int) -> None:
    """All crossings into layouts of so many processes, in one launch."""
    pairs = [(source, BY_NAME[target]) for source, target in CROSSINGS if BY_NAME[target].world_size == world_size]
    paths = [(runs.checkpoint(BY_NAME[source]), layout) for source, layout in pairs]
    results = harness.run(jobs.resume_crossings, world_size, paths)[0]
    reference = runs.result(SINGLE)["whole"]
    for (source, layout), resumed in zip(pairs, results, strict=True):
        print(f"{source} continued under {layout.name}")  # the last one printed is the one that failed
        assert_close(resumed["losses"], reference["losses"][SAVED_STEP:])
        assert_close(resumed["norms"], reference["norms"][SAVED_STEP:])


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first one makes the checkpoints of all layouts
@EVERY
def test_resume_from_every_strategy(runs, layout: Layout) -> None:
    paths = [runs.checkpoint(source) for source in LAYOUTS]
    resumed = harness.run(jobs.resume_each, layout.world_size, layout, paths, timeout_seconds=280)[0]
    reference = runs.result(SINGLE)["whole"]
    for source, result in zip(LAYOUTS, resumed, strict=True):
        worst = max(
            abs(got / wanted - 1)
            for got, wanted in zip(result["losses"], reference["losses"][SAVED_STEP:], strict=True)
        )
        runs.differences[source.name, layout.name] = worst
        assert_close(result["losses"], reference["losses"][SAVED_STEP:])
        assert_close(result["norms"], reference["norms"][SAVED_STEP:])
    if layout == ALL[-1]:
        print("\n" + table_of(runs.differences))


def table_of(differences: dict[tuple[str, str], float]) -> str:
    """Markdown: rows save, columns continue; for docs/strategies.md."""
    sources, targets = (list(dict.fromkeys(pair[side] for pair in differences)) for side in (0, 1))
    lines = ["| saved under | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for source in sources:
        lines.append(f"| {source} | " + " | ".join(f"{differences[source, target]:.1e}" for target in targets) + " |")
    return "\n".join(lines)


@EVERY
def test_a_skipped_step_changes_nothing(runs, layout: Layout) -> None:
    skip, reference = runs.result(layout)["skip"], runs.result(SINGLE)["skip"]
    states = skip["states"]
    assert skip["skipped"] == 1
    asked = [rank["skip"]["asked"] for rank in runs.ranks(layout)]
    assert all(rank == asked[0] for rank in asked)  # the same numbers on all ranks: norm, loss of the global batch
    assert [norm for norm, _ in asked[0]] == skip["norms"]
    assert [loss for _, loss in asked[0]] == pytest.approx(skip["losses"], rel=1e-6)
    assert len(states[0]) > 30
    assert states[SKIPPED] == states[SKIPPED - 1]  # weights, moments and step counts, bit for bit
    for earlier, later in itertools.pairwise(states):
        changed = {key for key in earlier if earlier[key] != later[key]}
        assert changed == (set() if later is states[SKIPPED] else set(earlier))
    assert_close(skip["losses"], reference["losses"])
    assert_close(skip["norms"], reference["norms"])


@EVERY
def test_a_checkpoint_loads_into_a_running_fit(runs, layout: Layout) -> None:
    for rank in runs.ranks(layout):
        assert rank["roll_back"] == {"same": True, "moved": True, "continued": True}


@EVERY
def test_tied_embeddings(runs, layout: Layout) -> None:
    tied, reference = runs.result(layout)["tied"], runs.result(SINGLE)["tied"]
    assert_close(tied["losses"], reference["losses"])
    assert_close(tied["norms"], reference["norms"])
    assert_close(tied["resumed"]["losses"], reference["losses"][2:])


@EVERY
def test_bf16_mixed_follows_fp32_and_keeps_fp32_state(runs, layout: Layout) -> None:
    bf16, reference = runs.result(layout)["bf16"], runs.result(SINGLE)["whole"]
    assert bf16["losses"] != reference["losses"][:6]
    assert_close(bf16["losses"], reference["losses"][:6], tolerance=3e-3)
    assert_close(bf16["norms"], reference["norms"][:6], tolerance=5e-2)
    assert bf16["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("layout", [BY_NAME["ddp-2"], BY_NAME["fsdp-2"], BY_NAME["zero1-2"]], ids=lambda x: x.name)
def test_checkpoint_keys_do_not_depend_on_the_strategy(runs, layout: Layout) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    def description(path):
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        return {key: (tuple(entry.size), entry.properties.dtype) for key, entry in entries.items()}

    path = runs.checkpoint(layout)
    assert description(path) == description(runs.checkpoint(SINGLE))
    assert checkpoint.read_manifest(path)["step"] == SAVED_STEP


@pytest.mark.parametrize("layout", [BY_NAME["ddp-2"], BY_NAME["zero2-2"]], ids=lambda x: x.name)
def test_a_short_last_window_still_steps(layout: Layout) -> None:
    result = harness.run(jobs.last_window_is_short, layout.world_size, layout)[0]
    assert result == {"global_step": 2, "optimizer_steps": {2.0}}
