"""A batch-size ramp through the command line: length from tokens, validation in steps, tokens as measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.test_pretrain import folder, history, pretrain  # noqa: F401


def test_a_run_with_a_ramp(folder: Path) -> None:  # noqa: F811
    """5 steps of 2 windows (32 tokens each), then steps of 8: 320 + 19 x 256 tokens."""
    ramp = ("--data.batch_ramp", "[[0, 64], [300, 256]]", "--tokens", str(320 + 19 * 256))
    done = pretrain(folder, "--name", "ramp", *ramp)
    assert done.returncode == 0, done.stderr
    tokens = history(folder, "ramp", "tokens")
    assert tokens == {4: 256, 8: 320 + 3 * 256, 12: 320 + 7 * 256, 16: 320 + 11 * 256, 20: 320 + 15 * 256, 24: 5184}
    assert list(history(folder, "ramp", "val_loss")) == [8, 16, 24]
    losses = history(folder, "ramp", "loss")
    assert losses[4] == pytest.approx(5.7, abs=0.3)  # log 300, whatever the accumulation

    # The same steps on two processes from the checkpoint of step 16.
    (folder / "runs/ramp/checkpoints/step-00000024/manifest.json").unlink()
    again = pretrain(folder, "--name", "ramp", *ramp, "--ckpt_path", "last", world_size=2)
    assert again.returncode == 0, again.stderr
    assert history(folder, "ramp", "loss") == losses
