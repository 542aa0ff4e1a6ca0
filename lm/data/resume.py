"""Resume: does the data agree with the checkpoint, and do Lightning's batch counters agree with the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lm.data.order import DataPlan
from lm.errors import ConfigError


def plan_fingerprint(plan: DataPlan) -> dict[str, Any]:
    """The plan as plain values."""
    stages = [
        {
            "from_tokens": stage.from_tokens,
            "sequence_length": stage.sequence_length,
            "weights": {name: float(weight) for name, weight in stage.weights.items() if weight > 0},
        }
        for stage in plan.stages
    ]
    ramp = {"batch_ramp": [list(point) for point in plan.batch_ramp]} if plan.batch_ramp else {}
    return {"seed": plan.seed, "global_batch_tokens": plan.global_batch_tokens, "stages": stages, **ramp}


def check_fingerprint(
    saved: Mapping[str, Any], current: Mapping[str, Any], parts: Iterable[str], trained_tokens: int, folder: str
) -> None:
    """Compare the parts of two fingerprints. Stages that start later than `trained_tokens` may differ.

    Raises:
        ValueError: one line that says which part differs and how.
    """
    for part in parts:
        if part == "plan":
            difference = _plan_difference(saved["plan"], current["plan"], trained_tokens)
            if difference:
                raise ConfigError(
                    f"the data plan differs from the checkpoint's: {difference}; restore it or start a new run"
                )
        elif saved[part] != current[part]:
            raise ConfigError(
                f"the {part} in {folder} differ{'' if part == 'shards' else 's'} from the checkpoint's"
                f" (sha256 {current[part][:12]}, was {saved[part][:12]}); point data.dir at the folder it used"
            )


def _plan_difference(saved: Mapping[str, Any], current: Mapping[str, Any], trained_tokens: int) -> str | None:
    ramps = ["batch_ramp" in plan for plan in (saved, current)]
    for key in ("seed",) if any(ramps) else ("seed", "global_batch_tokens"):
        if saved[key] != current[key]:
            return f"{key} is {current[key]}, was {saved[key]}"
    old_ramp, new_ramp = (_batches_until(plan, trained_tokens) for plan in (saved, current))
    if old_ramp != new_ramp:
        return f"batch_ramp up to here is {new_ramp}, was {old_ramp}"
    # The first stage counts even when nothing was trained yet.
    old, new = ([s for s in p["stages"] if s["from_tokens"] < max(trained_tokens, 1)] for p in (saved, current))
    for index in range(max(len(old), len(new))):
        if index >= min(len(old), len(new)):
            return f"it has {len(new)} stages up to here, was {len(old)}"
        for key in ("from_tokens", "sequence_length", "weights"):
            if not _same(old[index][key], new[index][key]):
                return f"stage {index}'s {key} is {new[index][key]}, was {old[index][key]}"
    return None


def _batches_until(plan: Mapping[str, Any], tokens: int) -> list[list[int]]:
    ramp = plan.get("batch_ramp", [[0, plan["global_batch_tokens"]]])
    return [list(point) for point in ramp if point[0] < max(tokens, 1)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return set(a) == set(b) and all(abs(a[name] - b[name]) <= 1e-12 for name in a)
    return bool(a == b)


def align_progress(trainer: Any, saved_accumulate: int, accumulate: int) -> None:
    """Make Lightning's restored batch counters fit the new number of micro-batches a step.

    Lightning steps the optimizer when (batches so far) % accumulate == 0. After a resume with another number, or from
    a checkpoint written inside a step, that falls between two steps, and every later step would mix two batches.
    Called after the loops are restored and before they run (lightning 2.6: in FitLoop.setup_data).
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for tracker in (progress.current, progress.total):
        shift = tracker.ready // saved_accumulate * accumulate - tracker.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(tracker, name, getattr(tracker, name) + shift)
