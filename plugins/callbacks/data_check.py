"""Before training: are the shards what was prepared? A flipped bit in one is an id like any other, and never told."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from lm.data.files import DataError
from lm.data.shards import Manifest, verify_files
from plugins.callbacks.checkpoint import tell
from plugins.strategies import collectives


class DataCheck(Callback):
    """Part of every RecipeTrainer. The ranks share the files; a second for each gigabyte or less.

    What is larger than data.verify_bytes is left to `python -m recipes.data verify`, which a line says.

    Raises:
        DataError: in setup, on all ranks; a file has another sha256 than the manifest says.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        data = trainer.datamodule
        manifest, limit = getattr(data, "manifest", None), getattr(data, "verify_bytes", 0)
        if stage != "fit" or manifest is None or not limit:
            return
        if manifest.n_bytes() > limit:
            tell(
                trainer,
                f"note: the {manifest.n_bytes() / 1e9:.3g} GB of {manifest.folder} are more than data.verify_bytes and"
                f" are read unverified; once after copying: python -m recipes.data verify --dir {manifest.folder}",
            )
            return
        problems = collectives.gather(_problem(manifest))
        found = next((problem for problem in problems if problem), None)
        if found is not None:
            raise DataError(found)


def _problem(manifest: Manifest) -> str | None:
    """What is wrong with this rank's share of the files."""
    try:
        verify_files(manifest, collectives.rank(), collectives.world_size())
    except DataError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return None
