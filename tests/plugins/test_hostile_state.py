"""A state.pt made by hand, with a manifest that fits it, runs nothing and is refused in one line; odd settings too."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.errors import ConfigError
from plugins.callbacks.checkpoint import PeriodicCheckpoint
from plugins.callbacks.dashboard import Dashboard
from plugins.callbacks.spike_guard import SpikeGuard
from plugins.callbacks.young_checkpoint import YoungCheckpoint
from plugins.strategies import checkpoint, checkpoint_io
from plugins.strategies.checkpoint import CheckpointError

GOOD = {"global_step": 1, "epoch": 0, "loops": {}, "callbacks": {}, "optimizer": {"scalars": {}}}


class Hostile:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


def forge(path: Path, content: Any) -> Path:
    """A sound checkpoint but for its state.pt."""
    checkpoint_io.save({"param/w": torch.ones(2)}, GOOD, path, 1)
    if isinstance(content, bytes):
        (path / "state.pt").write_bytes(content)
    else:
        torch.save(content, path / "state.pt")
    manifest = {"format": 1, "step": 1, "files": checkpoint.describe(path, checkpoint.file_names(path))}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "but a list"),
        (torch.ones(3), "but a Tensor"),
        ({**GOOD, "global_step": "one"}, "global_step is a str, not a int"),
        ({**GOOD, "loops": 7}, "loops is a int, not a dict"),
        ({**GOOD, "callbacks": [1]}, "callbacks is a list, not a dict"),
        ({**GOOD, "optimizer": {"scalars": None}}, "its optimizer has no scalars"),
        (b"no pickle at all", "is refused"),
        (b"", "is refused"),
    ],
)
def test_a_state_of_the_wrong_kind_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        checkpoint_io.Reader(forge(tmp_path / "step-00000001", content))
    assert words in str(error.value) and "state.pt" in str(error.value) and "\n" not in str(error.value)


def test_code_in_a_state_is_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    path = forge(tmp_path / "step-00000001", {**GOOD, "callbacks": {"x": Hostile(proof)}})
    with pytest.raises(CheckpointError, match="is refused") as error:
        checkpoint_io.Reader(path)
    assert "\n" not in str(error.value) and "posix.system" in str(error.value)
    assert not proof.exists()
    torch.load(path / "state.pt", weights_only=False)  # what the file would have done
    assert proof.exists()


def test_a_sound_state_is_read(tmp_path: Path) -> None:
    assert checkpoint_io.Reader(forge(tmp_path / "step-00000001", GOOD)).rest == GOOD


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (SpikeGuard, "threshold"),
        (Dashboard, "straggler_factor"),
        (Dashboard, "peak_tflops"),
        (YoungCheckpoint, "failures_per_device_day"),
        (YoungCheckpoint, "max_interval_seconds"),
        (YoungCheckpoint, "time_limit_seconds"),
        (YoungCheckpoint, "final_retry_seconds"),
        (PeriodicCheckpoint, "permanent_every_tokens"),
    ],
)
def test_settings_without_bounds_are_refused(kind: Any, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name) as error:
        kind(**{name: value})
    assert "\n" not in str(error.value) and "finite" in str(error.value)
