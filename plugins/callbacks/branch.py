"""A run that begins from a checkpoint that is not its newest: is anything left to train, and what gives way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from plugins.strategies import checkpoint
from plugins.strategies.checkpoint import CheckpointError

MARK = ".leaving"  # in the folder of checkpoints; holds the step that the run goes back to


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


def after(folder: Path, step: int) -> list[Path]:
    """Checkpoints of later steps, sound or not, the newest first.

    They belong to a branch that is given up. Left where they are, they would count as the newest: the run's own would
    be removed in their favour, and the next start would go on from them.
    """
    named = [(path.name.rpartition("-")[2], path) for path in folder.glob("step-*")]
    later = [(int(digits), path) for digits, path in named if digits.isdecimal() and int(digits) > step]
    return [path for _, path in sorted(later, reverse=True)]


def leave(folder: Path, step: int, forget: Callable[[], None]) -> list[Path]:
    """Rename the checkpoints after the one that the run goes on from, and return their new places.

    Args:
        forget: makes what else the run's folder holds of that branch count no more. It is called for the renamed
            checkpoints, and again by the next start where a kill came before it was done: a mark in the folder says so.
    """
    later, mark = after(folder, step), folder / MARK
    if later:
        with suppress(OSError):  # a full disk: only a kill in the next moments would go unnoticed
            mark.write_text(str(step))
    # The newest last: a kill before that leaves the branch as it was, and a start goes on with it.
    moved = [checkpoint.set_aside(path, checkpoint.ABANDONED) for path in reversed(later)]
    moved = [path for path in moved if path.name.startswith(checkpoint.ABANDONED)]
    if moved or step <= _marked(mark):
        forget()
    with suppress(OSError):
        mark.unlink()
    return moved


def _marked(mark: Path) -> int:
    """The step of a mark that a kill left; -1 for none. A run that is past it went on with the branch."""
    try:
        return int(mark.read_text())
    except (OSError, ValueError):
        return -1
