"""How often a run repeats each source, from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm.columns import aligned
from lm.data.blocks import WEIGHT_TOLERANCE
from lm.data.order import DataOrder
from lm.data.plan import DataPlan
from lm.data.shards import Manifest
from lm.data.slices import SlicedStream, base_of, slice_of

# Muennighoff et al. 2023 (arXiv 2305.16264): up to about 4 epochs are nearly as good as fresh data.
MAX_EPOCHS = 4.0


@dataclass(frozen=True)
class EpochRow:
    """One source, or slice of one, of the epoch table; tokens of the train split, end-of-text included."""

    source: str
    documents: int
    unique_tokens: int
    bytes_per_token: float
    weight: float
    tokens_drawn: float
    epochs: float


def epoch_rows(manifest: Manifest, order: DataOrder, total_tokens: int) -> list[EpochRow]:
    """Of a run of `total_tokens`. The weight is that of the whole run; an epoch is each window once.

    A slice of a source has a row of its own; its bytes per token are the source's.
    """
    drawn = order.tokens_drawn(total_tokens)
    shares = order.tokens_drawn(max(total_tokens, 1))
    whole = sum(shares.values())
    stages = order.by_stage(total_tokens)
    rows = []
    for name in order.source_names:
        split = manifest.split(base_of(name, manifest.source_names), "train")
        tokens, documents = int(split["tokens"]), int(split["documents"])
        bytes_per_token = split["utf8_bytes"] / max(tokens - documents, 1)
        if name not in manifest.source_names:
            part = SlicedStream(manifest, slice_of(name, manifest.source_names), "train")
            tokens, documents = part.n_tokens, part.n_documents
        rows.append(
            EpochRow(
                source=name,
                documents=documents,
                unique_tokens=tokens,
                bytes_per_token=bytes_per_token,
                weight=shares[name] / whole,
                tokens_drawn=drawn[name],
                epochs=sum(stage[name][1] for stage in stages),
            )
        )
    return rows


@dataclass(frozen=True)
class StageRow:
    """What one stage draws of one source, or slice of one.

    Attributes:
        from_tokens: training tokens before the stage.
        sequence_length: T, tokens a window.
        weight: share of the stage.
        tokens_drawn: by this stage; 0 where the run ends before it.
        epochs: of the source's windows of this length.
    """

    stage: int
    from_tokens: int
    sequence_length: int
    source: str
    weight: float
    tokens_drawn: float
    epochs: float


def stage_rows(order: DataOrder, total_tokens: int) -> list[StageRow]:
    """The epoch table of a run of `total_tokens` by stage; sources that a stage does not draw are left out."""
    plan = order.plan
    found = []
    for index, (stage, drawn) in enumerate(zip(plan.stages, order.by_stage(total_tokens), strict=True)):
        begins, whole = plan.ramp.tokens(plan.first_step(index)), sum(stage.weights.values())
        for name in (name for name in order.source_names if stage.weights.get(name, 0) > 0):
            weight = stage.weights[name] / whole
            found.append(StageRow(index, begins, stage.sequence_length, name, weight, *drawn[name]))
    return found


def format_stage_rows(rows: Sequence[StageRow]) -> str:
    """The rows as aligned text."""
    header = ("stage", "source", "weight", "tokens drawn", "epochs")
    body = [
        (str(row.stage), row.source, f"{row.weight:.4f}", f"{row.tokens_drawn:,.0f}", f"{row.epochs:.2f}")
        for row in rows
    ]
    return aligned([header, *body], text_columns=(0, 1))


def repeat_warnings(rows: Sequence[EpochRow]) -> list[str]:
    """A line for each source that is read more than 4 times, the 1% aside that a block's whole counts may be off."""
    return [
        f"source '{row.source}' is repeated {row.epochs:.1f} times ({row.tokens_drawn:,.0f} tokens drawn from"
        f" {row.unique_tokens:,}); above {MAX_EPOCHS:.0f} epochs data is worth less: lower its weight or add text"
        for row in rows
        if row.epochs > MAX_EPOCHS * (1 + WEIGHT_TOLERANCE)
    ]


def format_table(rows: Sequence[EpochRow]) -> str:
    """The table as aligned text."""
    header = ("source", "documents", "unique tokens", "bytes/token", "weight", "tokens drawn", "epochs")
    body = [
        (
            row.source,
            f"{row.documents:,}",
            f"{row.unique_tokens:,}",
            f"{row.bytes_per_token:.3f}",
            f"{row.weight:.4f}",
            f"{row.tokens_drawn:,.0f}",
            f"{row.epochs:.2f}",
        )
        for row in rows
    ]
    return aligned([header, *body])


def format_stages(plan: DataPlan, total_tokens: int) -> str:
    """The stages of a run of `total_tokens` as aligned text: where each begins, its length, and its mix in percent."""
    rows = [("stage", "step", "tokens", "sequence length", "windows a step", "mix")]
    for index, stage in enumerate(plan.stages):
        step = plan.first_step(index)
        begins = plan.ramp.tokens(step)
        whole = sum(stage.weights.values())
        mix = ", ".join(f"{name} {100 * weight / whole:.4g}%" for name, weight in stage.weights.items() if weight > 0)
        rows.append(
            (
                str(index),
                f"{step:,}",
                f"{begins:,}" if begins < total_tokens else "not reached",
                f"{stage.sequence_length:,}",
                f"{plan.samples_per_step(step):,}",
                mix,
            )
        )
    return aligned(rows, text_columns=(0, 5))
