"""What differs between kinds of sweeps, for the machinery that runs cells. IsoFLOP is the default of each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps.grid import Cell
from sweeps.grid_text import grid_table


@dataclass(frozen=True)
class SweepKind:
    """A kind of sweep.

    Attributes:
        title: for people.
        table: the grid as text.
        parent_params: MLflow params of the parent run, besides those every sweep has.
        extend: changes the trial spec of a cell, given by its id.
        trial: Ray Tune Trainable that runs a cell; None for sweeps.trial.CellTrial.
        scheduler: makes the Ray Tune scheduler; None for first in, first out, no cell stopped.
    """

    title: str = "IsoFLOP sweep"
    table: Callable[[Sequence[Cell]], str] = grid_table
    parent_params: Mapping[str, object] = field(default_factory=dict)
    extend: Callable[[str, dict[str, Any]], None] | None = None
    trial: Any = None
    scheduler: Callable[[], Any] | None = None
