"""A grid for people: its table, and what it repeats of the corpus."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lm.data.mix import settled_weights
from sweeps.config import SweepConfig
from sweeps.grid import Cell, Corpus


def epoch_warnings(cells: Sequence[Cell], config: SweepConfig, corpus: Corpus) -> list[str]:
    """One line for each source that the longest cell reads more than max_epochs times.

    Beyond about 4 epochs repeated tokens are worth visibly less than fresh ones (Muennighoff et al. 2023,
    arXiv 2305.16264), and curves with repeats measure something else.
    """
    longest = max(cells, key=lambda cell: cell.tokens)
    weights = settled_weights(config.data.weights or corpus.train_tokens, corpus.train_tokens, longest.tokens)
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


def grid_table(cells: Sequence[Cell], refused: Container[str] = ()) -> str:
    """The grid as text, one line a cell, ascending; cells whose label is in `refused` are marked."""
    wide = max(14, *(len(cell.label) + 2 for cell in cells))
    lines = [
        f"{'cell':<{wide}}{'id':<14}{'N':>13}{'tokens':>16}{'D/N':>7}{'steps':>9}{'warmup':>7}{'batch':>6}"
        f"{'layers':>7}{'heads':>8}{'d_ff':>7}{'lr hidden':>11}{'FLOPs off':>11}"
    ]
    for cell in sorted(cells, key=lambda c: (c.budget_flops, c.model.d_model, c.seed)):
        model, mark = cell.model, " REFUSED" if cell.label in refused else ""
        lines.append(
            f"{cell.label:<{wide}}{cell.cell_id:<14}{cell.n_params:>13,}{cell.tokens:>16,}"
            f"{cell.tokens / cell.n_params:>7.1f}{cell.steps:>9,}{cell.warmup_steps:>7}{cell.sequences:>6}"
            f"{model.n_layers:>7}{f'{model.n_heads}x{model.d_head}':>8}{model.d_ff:>7}"
            f"{cell.lr / model.width_multiplier:>11.2e}{cell.deviation:>+11.2%}{mark}"
        )
    return "\n".join(lines)
