"""From a sweep's config to its cells: sizes, tokens, steps, batch and learning rate of every run. Pure arithmetic.

The protocol is Hoffmann et al. 2022 (arXiv 2203.15556), approach 2: several sizes at each of several FLOP budgets,
every run with a schedule sized to its own length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.config import ModelConfig
from lm.errors import ConfigError
from lm.plan import DEFAULT_FLOP_CONVENTION, flops_per_token, n_params, steps_for_budget, tokens_for_budget
from sweeps.config import SweepConfig
from sweeps.shapes import model_config
from sweeps.sizes import widths_of

# Part of every cell's id: raise it when a change of the code changes what a cell measures.
CELL_VERSION = 1


@dataclass(frozen=True)
class Corpus:
    """What the grid must know of the prepared data.

    Attributes:
        vocab_size: ids of the tokenizer.
        train_tokens: tokens of each source's training split.
        fingerprint: sha256 of shards and tokenizer.
    """

    vocab_size: int
    train_tokens: dict[str, int]
    fingerprint: dict[str, str]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        budget_flops: FLOPs of the curve the cell belongs to.
        seed: of initial values and data order.
        model: shape.
        sequence_length: T in tokens.
        sequences: batch, in sequences of T.
        steps: optimizer steps.
        warmup_steps: of them, those before the peak learning rate.
        lr: peak learning rate at muP's base width (of every parameter without muP).
        cell_id: 12 hex digits, a hash of everything that changes the result.
    """

    budget_flops: float
    seed: int
    model: ModelConfig
    sequence_length: int
    sequences: int
    steps: int
    warmup_steps: int
    lr: float
    cell_id: str = ""

    @property
    def global_batch_tokens(self) -> int:
        """Tokens an optimizer step."""
        return self.sequences * self.sequence_length

    @property
    def tokens(self) -> int:
        """D, training tokens."""
        return self.steps * self.global_batch_tokens

    @property
    def n_params(self) -> int:
        """N under lm.plan's default convention."""
        return n_params(self.model)

    @property
    def flops(self) -> int:
        """C, exact FLOPs of the whole run under lm.plan's default convention."""
        return self.tokens * flops_per_token(self.model, self.sequence_length)

    @property
    def deviation(self) -> float:
        """Relative distance of the run's FLOPs from its budget."""
        return self.flops / self.budget_flops - 1

    @property
    def relative_cost(self) -> float:
        """Expected time in arbitrary units: narrow models reach fewer FLOPs a second (about d^0.75 up to d 100)."""
        return self.flops / min(self.model.d_model, 256) ** 0.75

    @property
    def label(self) -> str:
        """Short name for people: 1e+12-d64-s0."""
        return f"{self.budget_flops:.3g}-d{self.model.d_model}-s{self.seed}"


def build_grid(config: SweepConfig, corpus: Corpus) -> list[Cell]:
    """All cells, the longest first so that no core waits for a long run at the end.

    Raises:
        ConfigError: a cell that cannot be built, is too short, or misses its budget; the first with its reason.
    """
    cells, refused = plan_grid(config, corpus)
    if refused:
        more = f" (and {len(refused) - 1} more cells)" if len(refused) > 1 else ""
        raise ConfigError(next(iter(refused.values())) + more)
    return cells


def plan_grid(config: SweepConfig, corpus: Corpus) -> tuple[list[Cell], dict[str, str]]:
    """(all cells, the longest first; reasons by label of those among them that cannot be run).

    Raises:
        ConfigError: no grid can be planned at all.
    """
    widths = widths_of(config, lambda width: model_config(config, width, corpus.vocab_size))
    shared = _shared_lengths(config, corpus, widths) if config.mode == "trunk" else {}
    cells, refused = [], {}
    for budget in sorted(widths):
        for width in widths[budget]:
            for seed in config.seeds:
                cell = make_cell(config, corpus, budget, width, seed, shared=shared.get(width))
                if problem := _problem(cell, config):
                    refused[cell.label] = problem
                cells.append(cell)
    return sorted(cells, key=lambda cell: (-cell.relative_cost, cell.label)), refused


def make_cell(
    config: SweepConfig,
    corpus: Corpus,
    budget: float,
    width: int,
    seed: int,
    multiple: int = 1,
    shared: tuple[int, int] | None = None,
) -> Cell:
    """The run of one width at one budget, by the sweep's rules.

    Args:
        multiple: the batch is rounded to a multiple of it, so that as many processes can share it.
        shared: (sequences a batch, warmup steps) of all budgets of this width; None: by the rules from its own length.

    Raises:
        ConfigError: the width makes no model.
    """
    T = config.data.sequence_length
    model = model_config(config, width, corpus.vocab_size)
    tokens = tokens_for_budget(model, budget, T)
    if shared is None:
        sequences = fitting_batch(model, [budget], config, config.batch.sequences_for(tokens), multiple)
    else:
        sequences = shared[0]
    steps = steps_for_budget(model, budget, T, sequences * T)
    cell = Cell(
        budget_flops=budget,
        seed=seed,
        model=model,
        sequence_length=T,
        sequences=sequences,
        steps=steps,
        warmup_steps=config.warmup.steps_for(steps) if shared is None else shared[1],
        lr=config.lr_horizon.lr_for(config.lr, tokens),
    )
    return dataclasses.replace(cell, cell_id=cell_id(cell, config, corpus))


def cell_of_tokens(
    config: SweepConfig, model: ModelConfig, tokens: float, sequences: int, lr: float, seed: int
) -> Cell:
    """A run of so many tokens, whose budget is what it costs; cell_id is left to the caller.

    Raises:
        ConfigError: it is too short.
    """
    T = config.data.sequence_length
    steps = max(1, round(tokens / (sequences * T)))
    if steps < config.min_steps:
        raise ConfigError(
            f"{steps} steps of {sequences} sequences, min_steps is {config.min_steps}: raise tokens or lower sequences"
        )
    cell = Cell(
        budget_flops=1.0,
        seed=seed,
        model=model,
        sequence_length=T,
        sequences=sequences,
        steps=steps,
        warmup_steps=config.warmup.steps_for(steps),
        lr=lr,
    )
    return dataclasses.replace(cell, budget_flops=float(cell.flops))


def fitting_batch(
    model: ModelConfig, budgets: Sequence[float], config: SweepConfig, wanted: int, multiple: int = 1
) -> int:
    """Sequences a batch: the number nearest to `wanted`, at most a factor 2 away, with which whole steps hit every
    budget; the rule's own where none does."""
    T = config.data.sequence_length
    rule = max(1, round(wanted / multiple)) * multiple

    def hits(sequences: int) -> bool:
        for budget in budgets:
            steps = steps_for_budget(model, budget, T, sequences * T)
            flops = steps * sequences * T * flops_per_token(model, T)
            if abs(flops / budget - 1) > config.tolerance or steps < config.min_steps:
                return False
        return True

    least, most = max(multiple, -(-rule // (2 * multiple)) * multiple), 2 * rule
    near = sorted(range(least, most + 1, multiple), key=lambda sequences: (abs(sequences - rule), sequences))
    return next((sequences for sequences in near if hits(sequences)), rule)


def _shared_lengths(
    config: SweepConfig, corpus: Corpus, widths: Mapping[float, Sequence[int]]
) -> dict[int, tuple[int, int]]:
    """Of each width in mode trunk: (sequences a batch, warmup steps), which one trunk can have only once.

    The batch is the rule's for the geometric mean of the runs' lengths, the warmup the shortest run's.
    """
    T = config.data.sequence_length
    found = {}
    for width in sorted({width for row in widths.values() for width in row}):
        model = model_config(config, width, corpus.vocab_size)
        budgets = [budget for budget, row in widths.items() if width in row]
        tokens = [tokens_for_budget(model, budget, T) for budget in budgets]
        mean = math.exp(sum(map(math.log, tokens)) / len(tokens))
        sequences = fitting_batch(model, budgets, config, config.batch.sequences_for(mean))
        shortest = steps_for_budget(model, min(budgets), T, sequences * T)
        found[width] = (sequences, config.warmup.steps_for(shortest))
    return found


def _problem(cell: Cell, config: SweepConfig) -> str:
    """Why a cell cannot be run; empty when it can."""
    where = f"cell {cell.budget_flops:g} FLOPs, d_model {cell.model.d_model}"
    if cell.steps < config.min_steps:
        return (
            f"{where}: only {cell.steps} steps of {cell.sequences} sequences, min_steps is {config.min_steps};"
            " drop the width, raise the budget or lower batch.sequences"
        )
    if abs(cell.deviation) > config.tolerance:
        return (
            f"{where}: whole steps miss the budget by {cell.deviation:+.1%}, tolerance is {config.tolerance:.1%};"
            " drop the width or lower batch.sequences"
        )
    return ""


def cell_id(cell: Cell, config: SweepConfig, corpus: Corpus) -> str:
    """12 hex digits over everything that changes the cell's result: shape, length, rates, seed, data."""
    content = {
        "version": CELL_VERSION,
        "flop_convention": DEFAULT_FLOP_CONVENTION,
        "cell": {**dataclasses.asdict(dataclasses.replace(cell, cell_id="")), "model": _set_values(cell.model)},
        "optim": {key: value for key, value in config.optim.items() if key != "lr"},  # the cell has it as a number
        "data": {
            "fingerprint": corpus.fingerprint,
            "weights": config.data.weights,
            "validation_windows": config.data.validation_windows,
        },
        "precision": config.precision,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _set_values(model: ModelConfig) -> dict[str, Any]:
    """Without values that are the default: a field that a later version adds must not make every cell another one."""
    plain = dataclasses.asdict(model)
    return {field.name: plain[field.name] for field in dataclasses.fields(model) if plain[field.name] != field.default}


def grid_id(cells: Sequence[Cell]) -> str:
    """12 hex digits over the set of cells: two sweeps with the same one measure the same."""
    return hashlib.sha256(" ".join(sorted(cell.cell_id for cell in cells)).encode()).hexdigest()[:12]
