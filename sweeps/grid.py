"""From a sweep's config to its cells: sizes, tokens, steps, batch and learning rate of every run. Pure arithmetic.

The protocol is Hoffmann et al. 2022 (arXiv 2203.15556), approach 2: several sizes at each of several FLOP budgets,
every run with a schedule sized to its own length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.config import ModelConfig, MuPConfig
from lm.errors import ConfigError
from lm.plan import DEFAULT_FLOP_CONVENTION, flops_per_token, n_params, steps_for_budget, tokens_for_budget
from sweeps.config import SweepConfig

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
        ConfigError: a cell that cannot be built, is too short, or misses its budget; all such cells are named.
    """
    cells, problems = [], []
    for budget, widths in sorted(config.budgets.items()):
        for width in sorted(widths):
            for seed in config.seeds:
                cell = make_cell(config, corpus, budget, width, seed)
                problems += _problems(cell, config)
                cells.append(cell)
    if problems:
        more = f" (and {len(problems) - 1} more cells)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)
    return sorted(cells, key=lambda cell: (-cell.relative_cost, cell.label))


def make_cell(config: SweepConfig, corpus: Corpus, budget: float, width: int, seed: int, multiple: int = 1) -> Cell:
    """The run of one width at one budget, by the sweep's rules.

    Args:
        multiple: the batch is rounded to a multiple of it, so that as many processes can share it.

    Raises:
        ConfigError: the width makes no model.
    """
    T = config.data.sequence_length
    model = model_config(config, width, corpus.vocab_size)
    sequences = config.batch.sequences_for(tokens_for_budget(model, budget, T))
    sequences = max(1, round(sequences / multiple)) * multiple
    steps = steps_for_budget(model, budget, T, sequences * T)
    cell = Cell(
        budget_flops=budget,
        seed=seed,
        model=model,
        sequence_length=T,
        sequences=sequences,
        steps=steps,
        warmup_steps=config.warmup.steps_for(steps),
        lr=_learning_rate(config),
    )
    return dataclasses.replace(cell, cell_id=cell_id(cell, config, corpus))


def _learning_rate(config: SweepConfig) -> float:
    lr = config.optim.get("lr", 3e-4)
    try:
        return float(lr)  # YAML reads 8e-3 as text
    except (TypeError, ValueError):
        raise ConfigError(f"optim.lr must be a number, got {lr!r}") from None


def _problems(cell: Cell, config: SweepConfig) -> list[str]:
    where = f"cell {cell.budget_flops:g} FLOPs, d_model {cell.model.d_model}"
    if cell.steps < config.min_steps:
        return [
            f"{where}: only {cell.steps} steps of {cell.sequences} sequences, min_steps is {config.min_steps};"
            " drop the width, raise the budget or lower batch.sequences"
        ]
    if abs(cell.deviation) > config.tolerance:
        return [
            f"{where}: whole steps miss the budget by {cell.deviation:+.1%}, tolerance is {config.tolerance:.1%};"
            " drop the width or lower batch.sequences"
        ]
    return []


def model_config(config: SweepConfig, width: int, vocab_size: int) -> ModelConfig:
    """Shape of the size `width`.

    Raises:
        ConfigError: an unknown or bad setting of `model`, or a width that no allowed head size divides.
    """
    settings: dict[str, Any] = dict(config.model)
    for owned in ("vocab_size", "d_model", "n_heads"):
        if owned in settings:
            raise ConfigError(f"model.{owned} follows from the corpus, the widths and d_head; remove it")
    if isinstance(settings.get("mup"), Mapping):
        settings["mup"] = _dataclass(MuPConfig, settings["mup"], "model.mup")
    settings |= {"vocab_size": vocab_size, "d_model": width, "n_heads": width // head_size(width, config.d_head)}
    settings.setdefault("n_layers", 3)
    return _dataclass(ModelConfig, settings, "model")


def head_size(width: int, d_head: int) -> int:
    """The even divisor of `width` nearest to `d_head` by ratio, at most a factor 2 away; the larger one of equals.

    Raises:
        ConfigError: there is none.
    """
    divisors = [size for size in range(2, width + 1, 2) if width % size == 0 and d_head <= 2 * size <= 4 * d_head]
    if not divisors:
        raise ConfigError(
            f"width {width} does not divide by a head size near {d_head} (even, {-(-d_head // 2)} to {2 * d_head});"
            f" take {max(1, round(width / d_head)) * d_head} or change d_head"
        )
    return min(divisors, key=lambda size: (max(size / d_head, d_head / size), -size))


def _dataclass(kind: type, values: Mapping[str, Any], where: str) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError(f"unknown setting {where}.{unknown[0]}; known: {', '.join(known)}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


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


def epoch_warnings(cells: Sequence[Cell], config: SweepConfig, corpus: Corpus) -> list[str]:
    """One line for each source that the longest cell reads more than max_epochs times.

    Beyond about 4 epochs repeated tokens are worth visibly less than fresh ones (Muennighoff et al. 2023,
    arXiv 2305.16264), and curves with repeats measure something else.
    """
    longest = max(cells, key=lambda cell: cell.tokens)
    weights: Mapping[str, float] = config.data.weights or corpus.train_tokens
    total = sum(weights.values())
    lines = []
    for source, weight in weights.items():
        unique = corpus.train_tokens.get(source, 0)
        epochs = longest.tokens * weight / total / unique if unique else 0.0
        if epochs > config.max_epochs:
            lines.append(
                f"cell {longest.label} reads {source} {epochs:.1f} times ({unique:,} unique tokens), max_epochs is"
                f" {config.max_epochs:g}: give more text or drop the smallest widths of the largest budget"
            )
    return lines


def grid_table(cells: Sequence[Cell]) -> str:
    """The grid as text, one line a cell, ascending."""
    header = (
        f"{'cell':<14}{'id':<14}{'N':>9}{'tokens':>11}{'D/N':>7}{'steps':>7}{'warmup':>7}{'batch':>6}"
        f"{'heads':>7}{'d_ff':>6}{'lr hidden':>11}{'FLOPs off':>11}"
    )
    lines = [header]
    for cell in sorted(cells, key=lambda c: (c.budget_flops, c.model.d_model, c.seed)):
        model = cell.model
        lines.append(
            f"{cell.label:<14}{cell.cell_id:<14}{cell.n_params:>9,}{cell.tokens:>11,}"
            f"{cell.tokens / cell.n_params:>7.1f}{cell.steps:>7,}"
            f"{cell.warmup_steps:>7}{cell.sequences:>6}{f'{model.n_heads}x{model.d_head}':>7}"
            f"{model.d_ff:>6}{cell.lr / model.width_multiplier:>11.2e}{cell.deviation:>+11.2%}"
        )
    return "\n".join(lines)
