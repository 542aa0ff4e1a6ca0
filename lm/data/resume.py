"""Resume: does the data agree with the checkpoint, and do Lightning's batch counters agree with the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lm.data.packing import VERSION
from lm.data.plan import DataPlan, Stage
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
    packing = {"packing": plan.packing, "packing_version": VERSION} if plan.packing != "cut" else {}
    return {"seed": plan.seed, "global_batch_tokens": plan.global_batch_tokens, "stages": stages, **ramp, **packing}


def check_fingerprint(
    saved: Mapping[str, Any], current: Mapping[str, Any], parts: Iterable[str], step: int, folder: str
) -> None:
    """Compare the parts of two fingerprints. Of the plans, what begins after the first `step` steps may differ.

    Raises:
        ValueError: one line that says which part differs and how.
    """
    for part in parts:
        if part == "plan":
            difference = _plan_difference(saved["plan"], current["plan"], step)
            if difference:
                raise ConfigError(
                    f"the data plan differs from the checkpoint's: {difference}; restore it or start a new run"
                )
        elif saved[part] != current[part]:
            raise ConfigError(
                f"the {part} in {folder} differ{'' if part == 'shards' else 's'} from the checkpoint's"
                f" (sha256 {current[part][:12]}, was {saved[part][:12]}); point data.dir at the folder it used"
            )


def plan_from(fingerprint: Mapping[str, Any]) -> DataPlan:
    """The plan that a fingerprint was made of."""
    stages = tuple(Stage(s["from_tokens"], s["sequence_length"], s["weights"]) for s in fingerprint["stages"])
    ramp = tuple((int(tokens), int(batch)) for tokens, batch in fingerprint.get("batch_ramp", ()))
    packing = fingerprint.get("packing", "cut")
    return DataPlan(fingerprint["seed"], fingerprint["global_batch_tokens"], stages, ramp, packing)


def _plan_difference(saved: Mapping[str, Any], current: Mapping[str, Any], step: int) -> str | None:
    ramps = ["batch_ramp" in plan for plan in (saved, current)]
    for key in ("seed",) if any(ramps) else ("seed", "global_batch_tokens"):
        if saved[key] != current[key]:
            return f"{key} is {current[key]}, was {saved[key]}"
    for key, default in (("packing", "cut"), ("packing_version", None)):
        if saved.get(key, default) != current.get(key, default):
            return f"{key} is {current.get(key, default)}, was {saved.get(key, default)}"
    old_ramp, new_ramp = (_batches_until(plan_from(plan), step) for plan in (saved, current))
    if old_ramp != new_ramp:
        return f"batch_ramp up to here is {new_ramp}, was {old_ramp}"
    old, new = (_stages_until(plan, step) for plan in (saved, current))
    for index in range(max(len(old), len(new))):
        if index >= min(len(old), len(new)):
            return f"it has {len(new)} stages up to here, was {len(old)}"
        for key in ("from_tokens", "sequence_length", "weights"):
            if not _same(old[index][key], new[index][key]):
                return f"stage {index}'s {key} is {new[index][key]}, was {old[index][key]}"
    return None


def _stages_until(fingerprint: Mapping[str, Any], step: int) -> list[Mapping[str, Any]]:
    """Stages that a step before this one lies in; the first one always."""
    return fingerprint["stages"][: plan_from(fingerprint).stage_of_step(max(step - 1, 0)) + 1]


def _batches_until(plan: DataPlan, step: int) -> list[list[int]]:
    return [list(point) for point in plan.ramp.points[: plan.ramp.piece(max(step - 1, 0)) + 1]]


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


def change_accumulation(trainer: Any, accumulate: int) -> None:
    """Between two steps: go on with another number of micro-batches a step.

    Lightning steps where (batches so far) % accumulate == 0 and validates where (batches so far) % val_check_batch
    == 0: all counts are put on the new scale, on which they are steps x accumulate again.
    """
    old = int(trainer.accumulate_grad_batches)
    align_progress(trainer, old, accumulate)
    trainer.accumulate_grad_batches = accumulate
    if isinstance(trainer.val_check_interval, int):
        trainer.val_check_interval = max(1, trainer.val_check_interval // old * accumulate)
        trainer.val_check_batch = trainer.val_check_interval
