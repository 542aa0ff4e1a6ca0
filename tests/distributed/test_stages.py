"""A change of length, RoPE base and mix under every strategy: the losses of one process, also after a resume."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import harness, stage_jobs
from tests.distributed.scenario import LAYOUTS, SINGLE, TENSOR_LAYOUTS, Layout
from tests.distributed.stage_jobs import SAVES, STEPS
from tests.stage_runs import G, T, source_of, write_corpus

BY_NAME = {layout.name: layout for layout in LAYOUTS}
WORKERS = {"ddp-2": 2}
# Each resumes in all three stages from checkpoints of the one before it.
CHAIN = ["single-1", "ddp-2", "fsdp-2", "zero2-2"]


class Results:
    """Runs by layout, made when asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.corpus = folder / "data"
        write_corpus(self.corpus)
        self._made: dict[str, list[list[dict[int, Any]]]] = {}

    def of(self, layout: Layout, sources: str | None = None) -> list[list[dict[int, Any]]]:
        """Per rank: the whole run, then a resume from each checkpoint of the layout `sources`."""
        if layout.name not in self._made:
            paths = [self.folder / sources / f"step-{step:08d}" for step in SAVES] if sources else []
            self._made[layout.name] = harness.run(
                stage_jobs.train,
                layout.world_size,
                layout,
                self.corpus,
                self.folder / layout.name,
                paths,
                WORKERS.get(layout.name, 0),
            )
        return self._made[layout.name]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("stages"))


def assert_same(results: Results, layout: Layout, sources: str) -> None:
    """Losses and norms within 1e-5, the same windows over all ranks and the same RoPE, whole and after each resume."""
    (reference,) = results.of(SINGLE)[0]
    ranks = results.of(layout, sources)
    parts = max(1, layout.world_size // layout.arguments.get("tensor_parallel", 1))
    for run, first in enumerate((0, *SAVES)):
        assert sorted(ranks[0][run]) == list(range(first, STEPS))
        for step, seen in ranks[0][run].items():
            wanted = reference[step]
            assert seen["loss"] == pytest.approx(wanted["loss"], rel=1e-5), (run, step)
            assert seen["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), (run, step)
            assert (seen["lr"], seen["rope"]) == (wanted["lr"], wanted["rope"])
            readers = [ranks[rank][run][step] for rank in range(0, layout.world_size, layout.world_size // parts)]
            assert [row for reader in readers for row in reader["input_ids"]] == wanted["input_ids"]


def test_the_reference_goes_through_three_stages(results: Results) -> None:
    (steps,) = results.of(SINGLE)[0]
    assert [len(seen["input_ids"][0]) for seen in steps.values()] == [T] * 4 + [2 * T] * 8
    assert [seen["rope"][0] for seen in steps.values()] == [1e4] * 4 + [5e5] * 8
    assert {sum(map(len, seen["input_ids"])) for seen in steps.values()} == {G}
    for step, seen in steps.items():
        sources = {source_of(row) for row in seen["input_ids"]}
        assert sources <= ({"prose", "code"} if step < 9 else {"reference", "code"})


@pytest.mark.parametrize(("source", "target"), list(pairwise(CHAIN)), ids=lambda name: name)
def test_switches_and_resumes_equal_one_process(results: Results, source: str, target: str) -> None:
    for earlier, later in pairwise(CHAIN[: CHAIN.index(target)]):  # makes the checkpoints it resumes from
        results.of(BY_NAME[later], earlier)
    assert_same(results, BY_NAME[target], source)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [layout for layout in (*LAYOUTS[1:], *TENSOR_LAYOUTS) if layout.name not in CHAIN and layout.name != "fsdp-4"],
    ids=lambda layout: layout.name,
)
def test_the_other_layouts_too(results: Results, layout: Layout) -> None:
    results.of(SINGLE)
    assert_same(results, layout, "single-1")
