"""A cooldown from the checkpoint of a run with another schedule, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.test_pretrain import folder, history, pretrain  # noqa: F401

PEAK = 1e-3


def test_a_cooldown_starts_at_the_checkpoints_rate_and_ends_at_the_floor(folder: Path) -> None:  # noqa: F811
    common = ("--model.optim.lr", str(PEAK), "--trainer.log_every_n_steps", "1", "--model.optim.schedule.floor", "0.1")
    whole = pretrain(folder, "--name", "stem", *common)  # cosine over 16 steps, saved at 8
    assert whole.returncode == 0, whole.stderr
    stem = history(folder, "stem", "lr")
    kind = ("--model.optim.schedule.kind", "cooldown", "--model.optim.schedule.decay_shape", "1-sqrt")
    run = ("--name", "cooled", *common, *kind, "--tokens", str(24 * 256))
    done = pretrain(folder, *run, "--ckpt_path", str(folder / "runs/stem/checkpoints/step-00000008"))
    assert done.returncode == 0, done.stderr
    cooled = history(folder, "cooled", "lr")  # of steps done: 9 is the first after the checkpoint
    assert list(cooled) == list(range(9, 25))
    assert 0.1 * PEAK < stem[8] < 0.9 * PEAK
    assert cooled[9] == pytest.approx(stem[8], rel=1e-12)
    assert cooled[10] == pytest.approx(stem[8] - (stem[8] - 0.1 * PEAK) * (1 / 15) ** 0.5)
    assert cooled[24] == pytest.approx(0.1 * PEAK)

    # Cut off after step 16 and continued, it is the same cooldown and no new one.
    newest = folder / "runs/cooled/checkpoints/step-00000024"
    (newest / "manifest.json").unlink()
    again = pretrain(folder, *run, "--ckpt_path", "last")
    assert again.returncode == 0, again.stderr
    assert history(folder, "cooled", "lr") == cooled and (newest / "manifest.json").exists()
