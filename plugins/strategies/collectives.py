"""Agreement between processes: what fails on one rank fails on all of them, with the same words.

`group` holds all ranks too; None is the default one. A thread beside training needs one of its own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from plugins.strategies.checkpoint import CheckpointError


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in rank order. Collective."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value. Collective."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def one_line(error: BaseException) -> str:
    """The last, telling part of an error, without line breaks."""
    failures = getattr(error, "failures", None)  # torch's CheckpointException wraps the errors of the ranks
    if failures:
        failed_rank, (cause, _) = next(iter(failures.items()))
        return f"rank {failed_rank}: {one_line(cause)}"
    text = " ".join(str(error).split())
    if "unexpected pos" in text or "failed writing file" in text:
        text = f"a write was cut short, as on a full disk ({text})"  # torch's zip writer does not say why
    return text if isinstance(error, CheckpointError) and text else f"{type(error).__name__}: {text}"


def raise_together(error: BaseException | None, doing: str = "", group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if any rank brings an error. Collective.

    Args:
        error: this rank's error, or None.
        doing: words put before the error's text, such as "cannot save X".

    Raises:
        CheckpointError: with the text of the lowest failing rank.
    """
    texts = gather(None if error is None else one_line(error), group)
    failed = [(index, text) for index, text in enumerate(texts) if text is not None]
    if failed:
        index, text = failed[0]
        where = f" (rank {index})" if len(texts) > 1 else ""
        raise CheckpointError(f"{doing}: {text}{where}" if doing else f"{text}{where}") from error
