"""A .metadata made by hand, with a manifest that fits it: what it says of sizes and places is not believed."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.strategies import checkpoint, checkpoint_io
from plugins.strategies.checkpoint import CheckpointError
from tests.plugins.test_hostile_state import GOOD

HUGE = torch.Size([10**12, 10**6])


def forge(path: Path, change: Callable[[Any], None]) -> Path:
    """A sound checkpoint of one 4 x 3 tensor but for its .metadata."""
    checkpoint_io.save({"param/w": torch.ones(4, 3)}, GOOD, path, 1)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = {"format": 1, "step": 1, "files": checkpoint.describe(path, checkpoint.file_names(path))}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def tensor(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["param/w"]).update(fields)


def piece(start: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        (chunk,) = metadata.state_dict_metadata["param/w"].chunks
        chunk.offsets, chunk.sizes = torch.Size(start), torch.Size(shape)

    return change


def repeated(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["param/w"]
    entry.chunks = entry.chunks * 100_000  # torch's reader compares each with each


def place(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: [vars(found).update(fields) for found in metadata.storage_data.values()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (tensor(size=HUGE), "does not say where all of param/w is"),
        (tensor(chunks=[]), "does not say where all of param/w is"),  # would be left as it is: zeros
        (tensor(size=None), "describes no tensors"),
        (tensor(properties=None), "does not say where all of param/w is"),
        (piece((0, 0), tuple(HUGE)), "does not say where all of param/w is"),
        (piece((10**15, 0), (4, 3)), "does not say where all of param/w is"),
        (piece((-2, 0), (4, 3)), "does not say where all of param/w is"),
        (piece((0, 0), (2, 3)), "does not say where all of param/w is"),
        (piece((0,), (12,)), "does not say where all of param/w is"),
        (repeated, "does not say where all of param/w is"),
        (place(length=1 << 60), "places param/w outside of __0_0.distcp"),
        (place(offset=1 << 60), "places param/w outside of __0_0.distcp"),
        (place(offset=-5), "places param/w outside of __0_0.distcp"),
        (place(length="x"), "describes no tensors"),
        (lambda metadata: metadata.storage_data.clear(), "does not say where all of param/w is"),
    ],
)
def test_sizes_and_places_that_cannot_be(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    path = forge(tmp_path / "step-00000001", change)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        checkpoint_io.Reader(path)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert time.monotonic() - began < 5


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """A scalar, an empty tensor and a matrix."""
    saved = {"param/a": torch.tensor(3.0), "param/b": torch.ones(0, 2), "param/w": torch.arange(6.0).view(2, 3)}
    checkpoint_io.save(saved, GOOD, tmp_path / "step-00000001", 1)
    read = {key: torch.zeros_like(value) for key, value in saved.items()}
    checkpoint_io.Reader(tmp_path / "step-00000001").load(read)
    assert all(torch.equal(read[key], saved[key]) for key in saved)
