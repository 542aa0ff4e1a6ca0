"""The record of a run's roll-backs: a file in the run's folder, written before the run goes on, and tags in MLflow.

A checkpoint knows only the roll-backs from before it was written. A run that is killed between a roll-back and its next
checkpoint learns from this file which samples are dropped and how often it went back.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lm.data.dropped import Ranges
from plugins.callbacks import rewind

FILE = "spike_guard.json"
_MOST_TAG = 4000  # characters; MLflow takes 5,000 to 8,000


@dataclass(frozen=True)
class RollBack:
    """One roll-back.

    Attributes:
        first_strike, last_strike: 0-based steps.
        at_step, to_step: steps done before and after it.
        dropped: [start, stop) of k, as they were numbered before it.
    """

    first_strike: int
    last_strike: int
    at_step: int
    to_step: int
    dropped: Ranges

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "dropped": [list(pair) for pair in self.dropped]}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> RollBack:
        return cls(**{**values, "dropped": [(int(start), int(stop)) for start, stop in values["dropped"]]})


def write(run_dir: Path, roll_backs: list[RollBack], skipped: Ranges) -> bool:
    """Replace the file, on rank 0: it holds the old content or the new, whenever the process dies.

    Args:
        skipped: all ranges of k that the run drops from now on.

    Returns:
        False where that failed, which is no reason to stop a run; a warning says so.
    """
    try:
        _write(run_dir, {"roll_backs": [back.plain() for back in roll_backs], "skipped": skipped})
    except OSError as error:
        rank_zero_warn(
            f"cannot write {run_dir / FILE} ({error.strerror}): tried again later; a run that is killed before its next"
            " checkpoint would forget the roll-back"
        )
        return False
    return True


def _write(run_dir: Path, content: dict[str, Any]) -> None:
    aside = run_dir / f".{FILE}.tmp"
    with open(aside, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(aside, run_dir / FILE)
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(run_dir: Path) -> tuple[list[RollBack], Ranges] | None:
    """What `write` was given last in this run folder; None where nothing was rolled back."""
    path = run_dir / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        skipped = [(int(start), int(stop)) for start, stop in content["skipped"]]
        return [RollBack.from_plain(values) for values in content["roll_backs"]], skipped
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        rank_zero_warn(f"{path} cannot be read ({error}): roll-backs newer than the checkpoint are forgotten")
        return None


def origin(trainer: Any) -> Path:
    """Folder of the run whose checkpoint training begins from: another run's for a cooldown, else this one's."""
    path = trainer.ckpt_path
    if path is not None and Path(path).parent.name == "checkpoints":
        return Path(path).parent.parent
    return Path(trainer.default_root_dir)


def recall(trainer: Any) -> tuple[list[RollBack], Ranges]:
    """The roll-backs and dropped ranges of k that the run which training begins from wrote down. Collective."""
    found = read(origin(trainer)) if trainer.is_global_zero else None
    past, skipped = trainer.strategy.broadcast(found) or ([], [])
    return past, skipped


def keep_dropped(trainer: Any) -> None:
    """For a run without a spike guard, on_train_start: what an earlier guard dropped stays dropped. Collective.

    The checkpoint that it went back to was written before that, and knows nothing of it.
    """
    past, skipped = recall(trainer)
    if hasattr(trainer.datamodule, "rolled_back") and any(back.to_step >= trainer.global_step for back in past):
        trainer.datamodule.rolled_back(skipped)
        rewind.reload_data(trainer)


def forget(trainer: Any) -> None:
    """On rank 0, for a run that was started from a checkpoint that was not its newest: the roll-backs that happened
    after it was written, with what they dropped, are of the branch that is left."""
    run_dir, step = Path(trainer.default_root_dir), trainer.global_step
    found = read(run_dir)
    if found is None or not hasattr(trainer.datamodule, "rolled_back"):
        return
    # A roll-back removes what is newer than where it leads, so a checkpoint from behind that place was written later.
    own = origin(trainer).absolute() == run_dir.absolute()
    known = max((i + 1 for i, back in enumerate(found[0]) if own and back.to_step < step), default=0)
    kept, skipped = found[0][:known], trainer.datamodule.order.skipped
    if len(kept) < len(found[0]):
        write(run_dir, kept, skipped)
        tag(trainer, kept, skipped)


def as_text(skipped: Ranges, roll_backs: list[RollBack]) -> str:
    """The dropped ranges of k and the roll-backs in a line that fits a tag."""
    ranges = " ".join(f"[{start}, {stop})" for start, stop in skipped)
    steps = ", ".join(f"{back.at_step} -> {back.to_step}" for back in roll_backs)
    return f"samples {ranges}; steps {steps}"[:_MOST_TAG]


def tag(trainer: Any, roll_backs: list[RollBack], skipped: Ranges) -> None:
    """Tag the MLflow run on rank 0; where that fails it costs a warning, and the next start does it again."""
    text = as_text(skipped, roll_backs)
    tags = {"spike_guard.roll_backs": str(len(roll_backs)), "spike_guard.dropped": text}
    for logger in trainer.loggers if trainer.is_global_zero else []:
        try:
            _set_tags(logger, tags)
        except Exception as error:  # training must not stop because a tracking server does
            rank_zero_warn(f"MLflow did not take the tags of a roll-back: {error}")


def _set_tags(logger: Any, tags: dict[str, str]) -> None:
    if hasattr(logger, "log_tags"):
        logger.log_tags(tags)
        return
    client, run_id = getattr(logger, "experiment", None), getattr(logger, "run_id", None)
    if run_id is not None and client is not None and hasattr(client, "set_tag"):  # Lightning's own MLFlowLogger
        for key, value in tags.items():
            client.set_tag(run_id, key, value)
