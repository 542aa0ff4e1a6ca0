"""What is missing of a sweep, as jobs for trials: cells, or trunks and the branches after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sweeps.config import SweepConfig
from sweeps.grid import Cell
from sweeps.jobs import Job
from sweeps.specs import trial_spec
from sweeps.trunks import Trunk


def jobs_of(
    missing: Sequence[Cell],
    trunks: Sequence[Trunk],
    config: SweepConfig,
    tracking_uri: str,
    parent: str,
    facts: dict[str, Any],
) -> list[Job]:
    """One job a missing cell, and one for each trunk that such cells go on from.

    Args:
        trunks: of the whole grid; none in mode runs.
        parent: MLflow run of the sweep.
        facts: further params of every cell.
    """
    wanted = {cell.cell_id for cell in missing}
    jobs = []
    for trunk in trunks:
        branches = [
            _branch(cell, start, trunk, config, tracking_uri, parent)
            for cell, start in zip(trunk.cells, trunk.starts, strict=True)
            if cell.cell_id in wanted
        ]
        if branches:
            jobs += [_trunk(trunk, branches, config, tracking_uri, parent), *branches]
    if not trunks:
        for cell in missing:
            cost = cell.relative_cost
            jobs.append(Job(cell.cell_id, trial_spec(cell, config, tracking_uri, parent), cost, cost))
    for job in jobs:
        job.spec["params"] |= facts
    return jobs


def _trunk(trunk: Trunk, branches: Sequence[Job], config: SweepConfig, tracking_uri: str, parent: str) -> Job:
    from sweeps.trunk_trial import trunk_spec

    longest = trunk.cells[-1]
    cost = longest.relative_cost * trunk.steps / longest.steps
    spec = trunk_spec(trunk, config, tracking_uri, parent)
    return Job(trunk.trunk_id, spec, cost, cost + max(job.cost for job in branches))


def _branch(cell: Cell, start: int, trunk: Trunk, config: SweepConfig, tracking_uri: str, parent: str) -> Job:
    from sweeps.trunk_trial import trunk_folder

    branch = {"folder": trunk_folder(config, parent, trunk), "step": start}
    cost = cell.relative_cost * (cell.steps - start) / cell.steps
    spec = trial_spec(cell, config, tracking_uri, parent, branch)
    return Job(cell.cell_id, spec, cost, cost, after=trunk.trunk_id)
