"""The Evaluation callback refuses before the first step what would end a run at its first evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lm.data.synthetic import write_folder
from lm.errors import ConfigError
from plugins.callbacks.evaluation import Evaluation


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "has no document of two tokens or more"),
        (b"a", "has no document of two tokens or more"),
        (b"\xff\xfea\x00", "is not UTF-8 at byte 0"),
    ],
)
def test_texts_are_read_before_the_first_step(tmp_path: Path, content: bytes | None, message: str) -> None:
    ids = np.array([5, 6, 7, 0])
    write_folder(tmp_path / "data", {"a": {"train": [ids] * 4, "validation": [ids]}}, 300)
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    trainer = SimpleNamespace(datamodule=SimpleNamespace(dir=tmp_path / "data"))
    with pytest.raises(ConfigError, match=message):
        Evaluation([str(path)]).on_fit_start(trainer, None)
    path.write_text("two words")
    Evaluation([str(path)]).on_fit_start(trainer, None)


def test_arguments() -> None:
    for arguments, message in (
        ({}, "give texts or questions"),
        ({"texts": ["a/x.txt", "b/x.txt"]}, "two files are named x"),
        ({"texts": ["x.txt"], "every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        ({"texts": ["x.txt"], "context": -1}, "context must be at least 0, got -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Evaluation(**arguments)
