"""Back to an older checkpoint inside a running fit. Written against lightning 2.6.6 (pinned).

The place for it is between two steps, before a batch is fetched: all counters are even, nobody holds a batch, and what
Lightning reads next (batch, batch index, position) follows the restored state. `interpose` gives a callback that place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from plugins.callbacks import branch
from plugins.strategies import checkpoint, checkpoint_io, collectives
from plugins.strategies.checkpoint import CheckpointError


class _Interposed(_PrefetchDataFetcher):
    """Lightning's fetcher of training batches, with a call before each batch is handed out."""

    before_next: Callable[[], None]

    def __next__(self) -> Any:
        self.before_next()
        return super().__next__()


def interpose(trainer: Any, before_next: Callable[[], None]) -> None:
    """Call `before_next` before each training batch is handed out; for on_train_start."""
    fetcher = _Interposed()
    fetcher.__dict__.update(trainer.fit_loop._data_fetcher.__dict__)  # with what it has fetched ahead
    fetcher.before_next = before_next
    trainer.fit_loop._data_fetcher = fetcher


def load(trainer: Any, path: Path) -> None:
    """Make trainer, module, data module and callbacks what they were at the checkpoint. Collective.

    The training loader goes on from where it is: call `data.rolled_back`, then `reload_data`. fit_loop.load_state_dict
    would set flags for a restart, which this is not.

    Raises:
        CheckpointError: on all ranks; the checkpoint is damaged. Weights may be half loaded then.
    """
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = trainer.strategy.load_checkpoint(path)
    _restore_progress(trainer, connector._loaded_checkpoint["loops"]["fit_loop"])
    connector.restore_precision_plugin_state()
    connector.restore_model()
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector.restore_lr_schedulers()
    connector._loaded_checkpoint = {}
    trainer.lightning_module.step_loss = 0.0


def _restore_progress(trainer: Any, saved: dict[str, Any]) -> None:
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.load_state_dict(saved["epoch_loop.batch_progress"])
    for tracker in (loop.batch_progress.total, loop.batch_progress.current):
        # The checkpoint was written inside on_train_batch_end or later: that batch is done.
        tracker.started = tracker.processed = tracker.completed = tracker.ready
    loop.scheduler_progress.load_state_dict(saved["epoch_loop.scheduler_progress"])
    loop.automatic_optimization.optim_progress.load_state_dict(
        saved["epoch_loop.automatic_optimization.optim_progress"]
    )
    loop.val_loop.batch_progress.load_state_dict(saved["epoch_loop.val_loop.batch_progress"])
    loop._batches_that_stepped = trainer.global_step


def reload_data(trainer: Any) -> None:
    """Iterate the training loader anew, from the trainer's step on and in the data module's present order."""
    loop = trainer.fit_loop
    for loader in loop._combined_loader.flattened:
        if hasattr(loader, "stream"):
            loader.stream.order = trainer.datamodule.order
    iter(loop._data_fetcher)


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the complete checkpoints in a folder, newest first, as rank 0 sees them. Collective."""
    return collectives.broadcast(_complete(folder) if collectives.rank() == 0 else None)


def _complete(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for entry in folder.glob("step-*"):
        try:
            found.append((int(checkpoint.read_manifest(entry)["step"]), entry))
        except CheckpointError:
            continue  # torn: whoever looks for the newest one reports it
    return sorted(found, reverse=True)


def first_sound(paths: Sequence[Path], say: Callable[[str], None], set_aside: bool = True) -> Path | None:
    """The first checkpoint whose files have their sha256; those before it are told of. Collective.

    Args:
        say: told what is wrong with each that is damaged.
        set_aside: rename those (see checkpoint.set_aside), so that training can save there again.
    """
    for path in paths:
        problem = checkpoint_io.check(path)  # before anything of it is loaded
        if problem is None:
            return path
        left = checkpoint.set_aside(path) if set_aside and collectives.rank() == 0 else path
        say(f"{problem} (it is {left.name} now)" if left != path else problem)
    return None


def remove_after(folder: Path, step: int) -> None:
    """On rank 0, remove the checkpoints of later steps, the newest first: a branch that is given up.

    A kill in between leaves a run that goes on with the oldest of them, comes to the same strikes and is here again.
    """
    for path in branch.after(folder, step) if collectives.rank() == 0 else []:
        try:
            checkpoint.remove(path)
        except OSError as error:
            rank_zero_warn(f"spike guard: cannot remove {path} of a branch that was given up: {error.strerror}")
