"""From sums over validation windows to the metrics that are logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def metrics_of_sets(
    sets: Sequence[tuple[str, str]], weights: Mapping[str, float], sums: Sequence[Sequence[float]]
) -> dict[str, float]:
    """validation_metrics of the loaders of each suffix: val_loss_long/<source> and val_loss_long beside val_loss.

    Args:
        sets: (suffix, source) of each loader.
        weights: share of each source.
        sums: of each loader, as in validation_metrics.
    """
    values: dict[str, float] = {}
    for suffix in dict.fromkeys(suffix for suffix, _ in sets):
        chosen = [(source, row) for (its, source), row in zip(sets, sums, strict=True) if its == suffix]
        names = [source for source, _ in chosen]
        found = validation_metrics(names, [weights.get(name, 0.0) for name in names], [row for _, row in chosen])
        for key, value in found.items():
            head, slash, source = key.partition("/")
            values[f"{head}{suffix}{slash}{source}"] = value
    return values


def validation_metrics(
    sources: Sequence[str], weights: Sequence[float], sums: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Losses in nats per token and bits per UTF-8 byte, per source and for the training mix.

    Args:
        sources: names.
        weights: share of each source in the training mix; the overall figures weigh the sources by it.
        sums: per source [nats, labelled tokens, UTF-8 bytes of the labelled tokens].

    Returns:
        val_loss/<source>, bpb/<source>, and val_loss, bpb.
    """
    values: dict[str, float] = {}
    total_loss = total_bpb = total_weight = 0.0
    for source, weight, (nats, tokens, n_bytes) in zip(sources, weights, sums, strict=True):
        if tokens == 0 or n_bytes == 0:
            continue
        loss, bpb = nats / tokens, nats / n_bytes / math.log(2)
        values[f"val_loss/{source}"], values[f"bpb/{source}"] = loss, bpb
        total_loss += weight * loss
        total_bpb += weight * bpb
        total_weight += weight
    if total_weight > 0:
        values["val_loss"], values["bpb"] = total_loss / total_weight, total_bpb / total_weight
    return values
