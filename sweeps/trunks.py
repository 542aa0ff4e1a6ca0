"""Mode trunk: the stable phase of a size is trained once, and each budget is a decay of its own from it.

Under WSD (Hu et al. 2024, arXiv 2404.06395; Hagele et al. 2024, arXiv 2405.18392) the rate before the decay does not
depend on the run's length, so runs of one size that differ in length alone are the same run up to the first step of the
shortest one's decay. A trunk trains that common part once, with a checkpoint where each decay begins; a branch resumes
the checkpoint as the WSD run it is. A cell's result and id are those of the whole run: on one machine to the last bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lm.optim.schedule import ScheduleConfig, wsd_decay_start
from sweeps.config import SweepConfig
from sweeps.grid import Cell, Corpus, cell_id


@dataclass(frozen=True)
class Trunk:
    """The stable phase that runs of one size and seed share.

    Attributes:
        trunk_id: 12 hex digits, a hash of everything that changes it; its length does not.
        cells: the runs, ascending by length.
        starts: first step of each run's decay, which is the number of steps its checkpoint has behind it.
    """

    trunk_id: str
    cells: tuple[Cell, ...]
    starts: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Steps that the trunk trains: up to its last branch."""
        return max(self.starts)

    @property
    def label(self) -> str:
        """Short name for people: trunk-d64-s0."""
        return f"trunk-d{self.cells[0].model.d_model}-s{self.cells[0].seed}"

    @property
    def flops(self) -> float:
        """Of the trunk."""
        longest = self.cells[-1]
        return longest.flops * self.steps / longest.steps

    @property
    def trained_flops(self) -> float:
        """Of trunk and branches."""
        decays = zip(self.cells, self.starts, strict=True)
        return self.flops + sum(cell.flops * (cell.steps - start) / cell.steps for cell, start in decays)


def schedule_of(cell: Cell, config: SweepConfig) -> ScheduleConfig:
    """The schedule that a cell is trained with."""
    return ScheduleConfig(**{**config.optim.get("schedule", {}), "warmup_steps": cell.warmup_steps})


def trunks_of(cells: Sequence[Cell], config: SweepConfig, corpus: Corpus) -> list[Trunk]:
    """The trunks of a grid, the most expensive first; none in mode runs."""
    if config.mode != "trunk":
        return []

    def common(cell: Cell) -> str:
        return cell_id(dataclasses.replace(cell, budget_flops=0.0, steps=0), config, corpus)

    named = sorted(((common(cell), cell) for cell in cells), key=lambda pair: (pair[0], pair[1].steps))
    trunks = []
    for trunk_id, group in itertools.groupby(named, key=lambda pair: pair[0]):
        row = tuple(cell for _, cell in group)
        starts = tuple(wsd_decay_start(cell.steps, schedule_of(cell, config)) for cell in row)
        trunks.append(Trunk(trunk_id, row, starts))
    return sorted(trunks, key=lambda trunk: (-trunk.flops, trunk.label))


def savings(trunks: Sequence[Trunk]) -> str:
    """One line: what trunks cost and what the same runs would cost one by one."""
    trained = sum(trunk.trained_flops for trunk in trunks)
    whole = sum(cell.flops for trunk in trunks for cell in trunk.cells)
    alone = sum(len(trunk.cells) == 1 for trunk in trunks)
    note = f"; {alone} of them with one branch, which saves nothing" if alone else ""
    return (
        f"{len(trunks)} trunks and {sum(len(trunk.cells) for trunk in trunks)} branches: {trained:.3g} FLOPs instead of"
        f" {whole:.3g}, {1 - trained / whole:.0%} saved{note}"
    )
