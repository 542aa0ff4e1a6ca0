"""The next cells as real runs of a sweep's config: its own shapes, lengths and rules, and a config that runs them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lm.errors import ConfigError
from lm.plan import n_params
from sweeps.config import SweepConfig
from sweeps.grid import Cell, Corpus, build_grid
from sweeps.planned import candidate_shapes
from sweeps.scaling.design import Cells


class Family:
    """Cells that a config could add, for `proposal.propose`.

    Args:
        config: of the sweep. corpus: its data.
    """

    def __init__(self, config: SweepConfig, corpus: Corpus) -> None:
        self.config, self.corpus = config, corpus
        self.there = {(cell.budget_flops, cell.model.d_model) for cell in build_grid(config, corpus)}
        self._made: dict[tuple[float, float], Cell] = {}

    def sizes(self, c_flops: float, n_opt: float, spread: float) -> Cells:
        """New cells at a budget, sizes within `spread` of N* in ln N; those the sweep's rules refuse are left out."""
        cells = []
        for shape in candidate_shapes(self.config, self.corpus.vocab_size, n_opt * math.exp(spread)):
            if abs(math.log(n_params(shape) / n_opt)) > spread or self._has(c_flops, shape.d_model):
                continue
            cell = self._cell(c_flops, shape.d_model)
            if cell is not None:
                self._made[float(cell.flops), float(cell.n_params)] = cell
                cells.append(cell)
        columns = zip(*((c.n_params, c.tokens, c.flops) for c in cells), strict=True) if cells else ([], [], [])
        return Cells(*(np.array(column, dtype=np.float64) for column in columns))

    def cells(self, chosen: Cells) -> list[Cell]:
        """The runs behind cells that `sizes` gave."""
        return [self._made[float(c), float(n)] for c, n in zip(chosen.c, chosen.n, strict=True)]

    def _has(self, c_flops: float, width: int) -> bool:
        return any(w == width and math.isclose(c, c_flops, rel_tol=1e-9) for c, w in self.there)

    def _cell(self, c_flops: float, width: int) -> Cell | None:
        """One run, by the sweep's rules; None where they refuse it (too few steps, too far off the budget)."""
        changes: dict[str, Any] = {"budgets": {c_flops: (width,)}, "sizes": None, "seeds": self.config.seeds[:1]}
        try:
            return build_grid(dataclasses.replace(self.config, **changes), self.corpus)[0]
        except ConfigError:
            return None


def extended_config(path: Path, family: Family, cells: Sequence[Cell]) -> str:
    """The sweep's YAML with the cells added to `budgets`; `sweeps.isoflop --resume` then runs those alone.

    Comments of the file are not kept.
    """
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    widths: dict[float, set[int]] = {}
    for budget, width in [*family.there, *((cell.budget_flops, cell.model.d_model) for cell in cells)]:
        widths.setdefault(budget, set()).add(width)
    raw.pop("sizes", None)
    raw["budgets"] = {_flops(budget): sorted(widths[budget]) for budget in sorted(widths)}
    head = f"# {path} and {len(cells)} cells proposed by sweeps.next.\n"
    return head + yaml.safe_dump(raw, sort_keys=False, default_flow_style=None)


def _flops(budget: float) -> float | int:
    """As short as it is exact."""
    return int(budget) if budget < 1e6 and budget.is_integer() else budget
