"""A learning-rate sweep's settings and its cells: learning rate x width (x batch) under each parametrisation.

The protocol is muTransfer's (Yang et al. 2022, arXiv 2203.03466, figure 1): all runs have the same number of tokens, so
that only width, learning rate and parametrisation differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.config import MuPConfig
from lm.errors import ConfigError
from sweeps.config import SweepConfig, parse_config
from sweeps.grid import Cell, Corpus, cell_id, cell_of_tokens
from sweeps.parsing import as_list, check_names, load, make, real, whole
from sweeps.shapes import head_size, model_config

MUP, STANDARD = "mup", "standard"
_OWNED = {  # settings of an IsoFLOP sweep -> what stands in their place here
    "budgets": "widths and tokens", "sizes": "widths", "batch": "sequences", "lr_horizon": "lr",
    "mode": "none: each cell is a run of its own",
}  # fmt: skip


@dataclass(frozen=True)
class EarlyStop:
    """Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934), within one curve of loss against LR.

    Attributes:
        every: steps between two reports of a trial's training loss (its mean since the last report).
        grace: steps no trial is stopped before.
        reduction: a trial goes on past a rung when it is among the best 1 / reduction there; rungs are grace x
            reduction^k steps.
        keep: the best so many at a rung always go on: a parabola needs neighbours of the minimum, too.
    """

    every: int = 20
    grace: int = 80
    reduction: float = 2.0
    keep: int = 4

    def __post_init__(self) -> None:
        if self.every < 1 or self.grace < self.every:
            raise ConfigError("early_stop: every must be at least 1 step and grace at least every")
        if self.reduction <= 1:
            raise ConfigError(f"early_stop: reduction must be above 1, got {self.reduction:g}")
        if self.keep < 3:
            raise ConfigError(f"early_stop: keep must be at least 3, a parabola's points, got {self.keep}")


@dataclass(frozen=True)
class LrSweep:
    """A learning-rate sweep.

    Attributes:
        common: what it shares with an IsoFLOP sweep (name, data, model, optimizer, resources, ...); optim.lr and
            budgets are not used.
        widths: d_model of each curve.
        lrs: peak learning rates, ascending; under muP at its base width.
        tokens: D of every cell.
        sequences: batches, in sequences.
        parametrisations: mup, standard.
        early_stop: None lets every trial run to its end.
    """

    common: SweepConfig
    widths: tuple[int, ...]
    lrs: tuple[float, ...]
    tokens: float
    sequences: tuple[int, ...] = (4,)
    parametrisations: tuple[str, ...] = (MUP, STANDARD)
    early_stop: EarlyStop | None = None

    def __post_init__(self) -> None:
        for name in ("widths", "lrs", "sequences", "parametrisations"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name} must be a list of different values, got {list(values)}")
        if min(self.widths) < 1 or min(self.sequences) < 1 or not self.tokens > 0:
            raise ConfigError("widths, sequences and tokens must be positive")
        if not all(math.isfinite(lr) and lr > 0 for lr in self.lrs):
            raise ConfigError(f"lr: learning rates must be positive, got {list(self.lrs)}")
        unknown = [name for name in self.parametrisations if name not in (MUP, STANDARD)]
        if unknown:
            raise ConfigError(f"parametrisations: {unknown[0]!r} is neither {MUP} nor {STANDARD}")
        if self.early_stop and self.common.resources.processes > 1:
            raise ConfigError("early_stop ends trials of one process; set it to null, or resources.processes to 1")
        if not isinstance(self.common.model.get("mup"), Mapping):
            raise ConfigError("model.mup must say the base width, such as mup: {base_width: 64, base_d_head: 32}")

    @property
    def grid_step(self) -> float:
        """Largest ratio of two neighbouring learning rates."""
        return max((b / a for a, b in zip(self.lrs, self.lrs[1:], strict=False)), default=1.0)


@dataclass(frozen=True)
class LrCell(Cell):
    """One run of a learning-rate sweep; its budget is what it costs."""

    @property
    def param(self) -> str:
        """mup or standard."""
        return STANDARD if self.model.mup is None else MUP

    @property
    def group(self) -> str:
        """The curve of loss against learning rate that the cell is a point of."""
        return f"{self.param}-d{self.model.d_model}-b{self.sequences}"

    @property
    def label(self) -> str:
        """Short name for people: mup-d64-b4-lr8.0e-03-s0."""
        return f"{self.group}-lr{self.lr:.1e}-s{self.seed}"


def load_lr_sweep(path: str | Path, overrides: Mapping[str, Any] | None = None) -> LrSweep:
    """Read a sweep's YAML.

    Args:
        overrides: top-level values that win over the file's.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, a value of the wrong kind, or one out of range.
    """
    return load(path, overrides, parse_lr_sweep, "conf/sweep/mup_lr.yaml")


def parse_lr_sweep(raw: Mapping[str, Any]) -> LrSweep:
    """An LrSweep from plain values, as load_lr_sweep."""
    rest = dict(raw)
    check_names(rest, _OWNED, ("widths", "lr", "tokens"), "a learning-rate sweep")
    widths = tuple(sorted(whole(w, "widths") for w in as_list(rest.pop("widths"), "widths")))
    lrs = _learning_rates(rest.pop("lr"))
    tokens = real(rest.pop("tokens"), "tokens")
    more: dict[str, Any] = {}
    if "sequences" in rest:
        more["sequences"] = tuple(sorted(whole(b, "sequences") for b in as_list(rest.pop("sequences"), "sequences")))
    if "parametrisations" in rest:
        more["parametrisations"] = tuple(
            str(name) for name in as_list(rest.pop("parametrisations"), "parametrisations")
        )
    if rest.get("early_stop") is not None:
        more["early_stop"] = make(EarlyStop, rest["early_stop"], "early_stop")
    rest.pop("early_stop", None)
    common = parse_config({"experiment": "scalewright-mup-lr", **rest, "budgets": {1.0: sorted(set(widths)) or [1]}})
    return LrSweep(common, widths, lrs, tokens, **more)


def _learning_rates(value: Any) -> tuple[float, ...]:
    """A list, or {low, high, step}: low x step^k up to high."""
    if not isinstance(value, Mapping):
        return tuple(sorted(real(rate, "lr") for rate in as_list(value, "lr")))
    unknown = [name for name in value if name not in ("low", "high", "step")]
    if unknown or "low" not in value or "high" not in value:
        raise ConfigError("lr must be a list of rates, or low, high and step (a factor, 2 if not given)")
    low, high, step = (real(number, "lr") for number in (value["low"], value["high"], value.get("step", 2)))
    if not (0 < low < high < math.inf and step > 1):
        raise ConfigError("lr: low must be positive, high above it, and step a factor above 1")
    return tuple(low * step**k for k in range(int(math.log(high / low) / math.log(step) + 1e-6) + 1))


def build_lr_grid(sweep: LrSweep, corpus: Corpus) -> list[LrCell]:
    """All cells: the longest first, and of one curve the middle learning rates first, which early stopping goes by.

    Raises:
        ConfigError: a cell that cannot be built or is too short.
    """
    middle = math.log(sweep.lrs[len(sweep.lrs) // 2])
    cells = [
        make_lr_cell(sweep, corpus, param, width, sequences, lr, seed)
        for param in sweep.parametrisations
        for width in sweep.widths
        for sequences in sweep.sequences
        for lr in sweep.lrs
        for seed in sweep.common.seeds
        if not (param == STANDARD and width == shared_width(sweep))
    ]
    return sorted(
        cells, key=lambda cell: (-round(cell.relative_cost), cell.group, abs(math.log(cell.lr) - middle), cell.label)
    )


def shared_width(sweep: LrSweep) -> int:
    """The width at which both parametrisations are one run, so that it runs once, as mup; 0 where there is none."""
    mup = MuPConfig(**sweep.common.model["mup"])
    width = mup.base_width
    if set(sweep.parametrisations) != {MUP, STANDARD} or width not in sweep.widths:
        return 0
    return width if head_size(width, sweep.common.d_head) == mup.base_d_head else 0


def make_lr_cell(
    sweep: LrSweep, corpus: Corpus, param: str, width: int, sequences: int, lr: float, seed: int
) -> LrCell:
    """One run. Under both parametrisations a width starts from the same values; see model_settings."""
    config = sweep.common
    settings = dataclasses.replace(config, model=model_settings(config, param, width))
    model = model_config(settings, width, corpus.vocab_size)
    cell = LrCell(**vars(cell_of_tokens(config, model, sweep.tokens, sequences, lr, seed)))
    return dataclasses.replace(cell, cell_id=cell_id(cell, config, corpus))


def model_settings(config: SweepConfig, param: str, width: int) -> dict[str, Any]:
    """The sweep's `model` under a parametrisation.

    Standard: no muP, and hidden matrices start with std init_std sqrt(base_width / d_model), 1 / sqrt(fan_in) as muP's
    do (arXiv 2203.03466, table 3): one learning rate for all parameters and logits that are not divided is what is left
    to differ. At base_width and base_d_head both are the same run.
    """
    if param == MUP:
        return config.model
    base = MuPConfig(**config.model["mup"]).base_width
    std = float(config.model.get("init_std", 0.02))
    embedding = float(config.model.get("embedding_init_std", 0.0)) or std
    hidden = std * math.sqrt(base / width)
    return {**config.model, "mup": None, "init_std": hidden, "embedding_init_std": embedding}


def lr_grid_table(cells: Sequence[Cell]) -> str:
    """The grid as text, one line a curve."""
    groups: dict[str, list[LrCell]] = {}
    for cell in cells:
        assert isinstance(cell, LrCell)
        groups.setdefault(cell.group, []).append(cell)
    lines = [f"{'curve':<20}{'N':>10}{'tokens':>10}{'steps':>7}{'batch':>6}{'seeds':>6}  learning rates"]
    for name, points in sorted(groups.items(), key=lambda item: (item[1][0].param, item[1][0].n_params, item[0])):
        first = points[0]
        lrs = sorted({cell.lr for cell in points})
        lines.append(
            f"{name:<20}{first.n_params:>10,}{first.tokens:>10,}{first.steps:>7,}{first.sequences:>6}"
            f"{len({cell.seed for cell in points}):>6}  {' '.join(f'{lr:.3g}' for lr in lrs)}"
        )
    return "\n".join(lines)
