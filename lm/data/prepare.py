"""Named sources -> a data folder, in stages that each finish before they count.

Everything is written to a hidden sibling of the output, `.NAME.partial`, which is renamed when complete: the output
is absent or whole. A later call with the same config goes on from the last finished source or shard. What the stages of
a source left is kept in `.NAME.stages`: a later call with another config does only those again that it changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from lm.data.executor import Executor, Serial
from lm.data.files import DataError, discard, disk_errors, exclusive, read_json, remove_leftovers, sha256_json
from lm.data.preparation import Log, Preparation
from lm.data.prepare_config import PrepareConfig
from lm.data.shards import MANIFEST, Manifest, load_manifest

__all__ = ["PrepareConfig", "prepare"]


def prepare(
    config: PrepareConfig,
    out: Path,
    overwrite: bool = False,
    log: Log = lambda line: None,
    executor: Executor | None = None,
) -> Manifest:
    """Make the data folder `out`, or return it when it was made from the same config already.

    Args:
        overwrite: replace an output that was made from another config.
        log: gets a line after each stage.
        executor: runs what can be done in parts; None: this process. The output is the same whatever runs them.

    Raises:
        DataError: one line; bad config or source, an output of another config, another prepare at work, a full disk.
    """
    out = _folder(out)
    identity = sha256_json(config.identity())
    hidden = {name: out.parent / f".{out.name}.{name}" for name in ("lock", "partial", "old", "stages")}
    busy = f"another prepare is writing {out}; wait for it or choose another --out"
    with disk_errors(out.parent), ExitStack() as held:
        unwritable: OSError | None = None
        try:
            held.enter_context(exclusive(hidden["lock"], busy))
            _after_a_kill(out, hidden)
        except OSError as error:
            unwritable = error  # of no matter where nothing is to be written
        made = _up_to_date(out, identity, overwrite)
        if made is not None:
            log(f"{out} is up to date (same config): nothing to do")
            return made
        if unwritable is not None:
            raise unwritable
        Preparation(config, identity, hidden["partial"], hidden["stages"], log, executor or Serial()).run()
        _swap(hidden["partial"], out, hidden["old"])
    log(f"wrote {out}")
    return load_manifest(out)


def _folder(out: Path) -> Path:
    """The absolute path of the output.

    Raises:
        DataError: no folder can be made there.
    """
    if "\0" in str(out):
        raise DataError(f"out {str(out)!r} is no name of a folder; choose another --out")
    # A link leads to the folder itself: everything is beside that, and one folder has one lock.
    out = Path(os.path.realpath(out))
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} exists and is not a folder; choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {out.parent}: {error.strerror}; choose another --out") from None
    return out


def _made_from(out: Path) -> str | None:
    """Identity of an existing output.

    Raises:
        DataError: the folder holds something else, which must not be deleted.
    """
    if not (out / MANIFEST).is_file():
        raise DataError(f"{out} exists and is not a prepared data folder; choose another --out")
    try:
        content = read_json(out / MANIFEST)
    except DataError:
        return None
    return str(content.get("config_sha256")) if isinstance(content, dict) else None


def _up_to_date(out: Path, identity: str, overwrite: bool) -> Manifest | None:
    """The output, if it was made from this config; None: there is none, or one to replace.

    Raises:
        DataError: one that must not be replaced.
    """
    if not out.exists() or not any(out.iterdir()):
        return None
    if _made_from(out) == identity:
        try:
            return load_manifest(out)
        except DataError:
            if not overwrite:
                raise
    elif not overwrite:
        raise DataError(
            f"{out} was prepared from another config or other text; pass --overwrite to replace it or choose another"
            " --out"
        )
    return None


def _after_a_kill(out: Path, hidden: Mapping[str, Path]) -> None:
    """Put right what a prepare that was killed left: nobody else is at work here."""
    old = hidden["old"]
    if not out.exists() and (old / MANIFEST).is_file():
        old.rename(out)  # killed between the two renames of an overwrite
    discard(old, MANIFEST)
    for name in ("partial", "stages"):
        remove_leftovers(hidden[name])


def _swap(partial: Path, out: Path, old: Path) -> None:
    if out.exists():
        out.rename(old)
    partial.rename(out)
    discard(old, MANIFEST)
