"""Runs through a change of length, RoPE base and mix, for the layouts of test_stages.py."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from plugins.callbacks.long_context import LongContext, LongStage
from plugins.callbacks.wsd_anneal import WSDAnneal
from tests.distributed.scenario import Layout, build_strategy, quiet
from tests.stage_runs import G, SaveAfter, T, run

STEPS, SAVES = 12, (2, 6, 10)  # stages begin at steps 4 (length, RoPE base) and 9 (mix: the decay)


def callbacks() -> list[Callback]:
    stage = LongStage(2 * T, from_tokens=4 * G, rope_theta=500_000.0)
    return [WSDAnneal({"reference": 1.0, "code": 1.0}), LongContext([stage])]


def train(layout: Layout, corpus: Path, folder: Path, sources: list[Path], workers: int = 0) -> list[dict[int, Any]]:
    """What each step saw: of the whole run, which leaves its checkpoints in `folder`, then of a resume from each."""
    quiet()
    if workers:  # as in a run of one's own: the harness's start method would import all anew in each loader worker
        multiprocessing.set_start_method("fork", force=True)
    results = []
    for start in (None, *sources):
        saving = [SaveAfter(folder, *SAVES)] if start is None else []
        steps, _ = run(
            corpus,
            STEPS,
            [*callbacks(), *saving],
            ckpt_path=start,
            strategy=build_strategy(layout),
            devices=layout.world_size,
            weights={"prose": 3.0, "code": 1.0},
            micro_batch_size=4,
            num_workers=workers,
        )
        results.append(steps)
    return results
