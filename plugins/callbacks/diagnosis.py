"""What a run that keeps spiking is likely to suffer from, read off its dashboard. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

History = Mapping[str, Iterable[tuple[int, float]]]

_LEAST_POINTS = 8
_GROWN, _LARGE_LOGIT = 2.0, 30.0  # attention logits: factor over the history, and a size below which none is harmful
_DRIFT_NATS = 2.0  # log Z of a healthy run stays near where it began
_UPDATE_RISE = 1.5


def diagnose(history: History, first_strike: int, struck_sources: Mapping[str, int] | None = None) -> str:
    """One sentence or more on the likely cause and its remedy.

    Compares the first with the last third of what was recorded before the first strike. The signs are those of
    Dehghani et al. 2023 (arXiv 2302.05442: attention logits that grow; QK-norm), Chowdhery et al. 2022 (arXiv
    2204.02311, sec. 5: log Z; z-loss) and Wortsman et al. 2023 (arXiv 2309.14322), who meet both in small models.

    Args:
        history: metric name -> (step, value) in the order of steps, as the dashboard keeps it; may be empty.
        first_strike: 0-based step of the first strike of the last roll-back.
        struck_sources: samples of each source in the steps that were struck.
    """
    found = [
        *_attention(history, first_strike),
        *_log_z(history, first_strike),
        *_updates(history, first_strike),
    ]
    return "; ".join(found) if found else _data(struck_sources or {})


def _attention(history: History, before: int) -> list[str]:
    worst: tuple[float, str, float, float] | None = None
    for name in history:
        if not name.startswith("attention_logit/"):
            continue
        ends = _ends(history[name], before)
        if ends is None:
            continue
        early, late = ends
        if late >= _LARGE_LOGIT and late >= _GROWN * early and (worst is None or late / early > worst[0]):
            worst = (late / max(early, 1e-12), name.partition("/")[2], early, late)
    if worst is None:
        return []
    _, block, early, late = worst
    return [f"attention logits grew from {early:.3g} to {late:.3g} in {block}: set model.config.qk_norm"]


def _log_z(history: History, before: int) -> list[str]:
    ends = _ends(history.get("log_z", ()), before)
    if ends is None or abs(ends[1] - ends[0]) < _DRIFT_NATS:
        return []
    return [f"log Z drifted from {ends[0]:.3g} to {ends[1]:.3g}: set model.z_loss (1e-4)"]


def _updates(history: History, before: int) -> list[str]:
    loss = _ends(history.get("loss", ()), before)
    if loss is None or loss[1] > loss[0]:
        return []  # the loss rose as well: no early sign
    rises = []
    for name in history:
        ends = _ends(history[name], before) if name.startswith("update_ratio/") else None
        if ends is not None and ends[0] > 0 and ends[1] >= _UPDATE_RISE * ends[0]:
            rises.append((ends[1] / ends[0], name.partition("/")[2], ends))
    if not rises:
        return []
    _, part, (early, late) = max(rises)
    return [
        f"updates grew against weights from {early:.2g} to {late:.2g} in {part} before the loss did: lower optim.lr"
    ]


def _data(sources: Mapping[str, int]) -> str:
    total = sum(sources.values())
    if total == 0:
        return "nothing recorded points at the model; look at the data of the struck steps"
    ranked = sorted(sources.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in ranked if count > 0)
    return f"nothing recorded points at the model; the struck samples are from {shares}: look at that data"


def _ends(points: Iterable[tuple[int, float]], before: int) -> tuple[float, float] | None:
    """Medians of the first and the last third of the points before a step; None where there are too few."""
    values: Sequence[float] = [value for step, value in points if step <= before and value == value]
    if len(values) < _LEAST_POINTS:
        return None
    third = len(values) // 3
    return statistics.median(values[:third]), statistics.median(values[-third:])
