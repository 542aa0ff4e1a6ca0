"""Runs of each layout, made once a session and shared by the tests that compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import harness, jobs
from tests.distributed.scenario import Layout


class Runs:
    """Results of jobs.train_and_resume by layout, and the folder with the checkpoints they left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.differences: dict[tuple[str, str], float] = {}  # filled by the slow test, (saved, continued)
        self._ranks: dict[Layout, list[dict[str, Any]]] = {}

    def ranks(self, layout: Layout) -> list[dict[str, Any]]:
        """What every rank returned."""
        if layout not in self._ranks:
            self._ranks[layout] = harness.run(jobs.train_and_resume, layout.world_size, layout, self.folder)
        return self._ranks[layout]

    def result(self, layout: Layout) -> dict[str, Any]:
        return self.ranks(layout)[0]

    def checkpoint(self, layout: Layout) -> Path:
        self.ranks(layout)
        return self.folder / layout.name


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))
