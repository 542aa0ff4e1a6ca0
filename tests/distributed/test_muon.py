"""Muon sees whole matrices under every strategy: the same losses, and a state that moves between strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugins.strategies import deepspeed_muon
from tests.distributed import harness, muon_jobs
from tests.distributed.scenario import LAYOUTS, SINGLE, TENSOR_LAYOUTS, Layout

BY_NAME = {layout.name: layout for layout in LAYOUTS + TENSOR_LAYOUTS}
CHOSEN = [
    *(BY_NAME[name] for name in ("ddp-2", "fsdp-2", "hsdp-4", "zero1-2", "zero2-2", "zero3-2")),
    pytest.param(BY_NAME["fsdp2_tp2"], marks=pytest.mark.slow),
]
CROSSINGS = [
    ("zero1-2", "fsdp-2"),
    ("fsdp-2", "zero3-2"),
    ("zero3-2", "single-1"),
    ("single-1", "zero2-2"),
    ("hsdp-4", "zero1-2"),
    ("ddp-2", "hsdp-4"),
]


class Runs:
    """Results of muon_jobs.train by layout, made when first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._results: dict[Layout, dict[str, Any]] = {}

    def __getitem__(self, layout: Layout) -> dict[str, Any]:
        if layout not in self._results:
            self._results[layout] = harness.run(muon_jobs.train, layout.world_size, layout, self.folder)[0]
        return self._results[layout]


@pytest.fixture(scope="module")
def muon_runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("muon"))


@pytest.mark.parametrize("layout", CHOSEN, ids=lambda layout: layout.name)
def test_losses_equal_one_process(muon_runs: Runs, layout: Layout) -> None:
    reference, run = muon_runs[SINGLE], muon_runs[layout]
    assert reference["losses"][-1] < 0.97 * reference["losses"][0]
    assert run["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert run["norms"] == pytest.approx(reference["norms"], rel=1e-5)
    assert run["resumed"] == pytest.approx(reference["losses"][muon_jobs.SAVED_STEP :], rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_momentum_moves_between_strategies(muon_runs: Runs, world_size: int) -> None:
    """All crossings into layouts of so many processes, in one launch."""
    reference = muon_runs[SINGLE]["losses"][muon_jobs.SAVED_STEP :]
    pairs = [(source, BY_NAME[target]) for source, target in CROSSINGS if BY_NAME[target].world_size == world_size]
    for source, _ in pairs:
        assert muon_runs[BY_NAME[source]]["losses"]  # the run that leaves the checkpoint
    paths = [(muon_runs.folder / source, layout) for source, layout in pairs]
    results = harness.run(muon_jobs.resume_crossings, world_size, paths)[0]
    for (source, layout), resumed in zip(pairs, results, strict=True):
        assert resumed == pytest.approx(reference, rel=1e-5), (source, layout.name)


def test_pieces_of_a_flattened_group_cover_every_matrix_once() -> None:
    """Five parts of 11 elements, matrices of 6, 12, 25 and 9: all but the first are cut, one reaches over three."""
    shapes, size = [(2, 3), (3, 4), (5, 5), (3, 3)], 11
    seen: dict[int, set[int]] = {index: set() for index in range(len(shapes))}
    for begin in range(0, 55, size):
        offset = 0
        for index, shape in enumerate(shapes):
            piece = deepspeed_muon._overlap(shape, offset, begin, size)
            own = set(range(piece.start, piece.start + piece.length))
            assert not own & seen[index] and piece.flat_start + piece.length <= size
            assert piece.is_cut == (index in (1, 2, 3))
            for element in own:  # the element's place in the whole group
                assert offset + element == begin + piece.flat_start + element - piece.start
            seen[index] |= own
            offset += shape[0] * shape[1]
    assert all(seen[index] == set(range(rows * cols)) for index, (rows, cols) in enumerate(shapes))
