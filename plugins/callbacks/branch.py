"""A run that begins from a checkpoint that is not its newest: is anything left to train, and what gives way."""

from __future__ import annotations

from pathlib import Path

from plugins.strategies import checkpoint
from plugins.strategies.checkpoint import CheckpointError


def nothing_left(path: Path, own_folder: Path, max_steps: int) -> str | None:
    """One line that says why a run of `max_steps` steps cannot begin from a checkpoint; None where it can.

    Args:
        path: of the checkpoint; one that cannot be read is left to whoever loads it.
        own_folder: of the run's own checkpoints, whose last one is no mistake: the run is complete.
    """
    try:
        step = int(checkpoint.read_manifest(path)["step"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
    own = path.absolute().parent == own_folder.absolute()
    if max_steps < 1 or step < max_steps or (own and step == max_steps):
        return None
    return (
        f"{path} is of step {step} and the run ends after step {max_steps}: nothing is left to train; raise tokens,"
        " which counts those before the checkpoint too, or take an older checkpoint"
    )


def give_way(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps than the one that the run goes on from, and return their new places.

    They belong to a branch that is given up. Left where they are, they would count as the newest: the run's own would
    be removed in their favour, and the next start would go on from them.
    """
    moved = []
    for path in sorted(folder.glob("step-*")):
        digits = path.name.rpartition("-")[2]
        if not digits.isdecimal() or int(digits) <= step:
            continue
        moved.append(checkpoint.set_aside(path, checkpoint.ABANDONED))
    return [path for path in moved if path.name.startswith(checkpoint.ABANDONED)]
