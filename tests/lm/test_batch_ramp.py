"""The batch-size ramp: exact token accounting, the same stream as without it, accumulation that follows, resume."""

from __future__ import annotations

import itertools

import pytest
import torch

from lm.data.plan import DataPlan, Stage
from lm.data.ramp import BatchRamp
from tests.lm.datamodule_helpers import G, SaveAt, T, attach, fit, make

RAMP = [[0, 2 * T], [12 * T, 4 * T], [20 * T, G]]  # 6 steps of 2 windows, 2 of 4, then of 8


def batches(steps: int) -> list[int]:
    return ([2] * 6 + [4] * 2 + [8] * steps)[:steps]


def test_tokens_are_piecewise_linear_in_the_step() -> None:
    ramp = BatchRamp([(0, 10), (25, 20), (100, 50)])
    takes = [ramp.batch(step) for step in range(12)]
    assert takes == [10] * 3 + [20] * 4 + [50] * 5  # 25 is reached inside the third step, 100 inside the seventh
    assert [ramp.tokens(step) for step in range(13)] == [0, *itertools.accumulate(takes)]
    for tokens in range(300):
        step = ramp.first_step_at(tokens)
        assert ramp.tokens(step) >= tokens and (step == 0 or ramp.tokens(step - 1) < tokens)
        nearest = min(range(1, 12), key=lambda step: abs(ramp.tokens(step) - tokens))
        assert abs(ramp.tokens(ramp.nearest_step(tokens)) - tokens) == abs(ramp.tokens(nearest) - tokens)


@pytest.mark.parametrize(
    "bad",
    [[(5, 10)], [(0, 0)], [(0, 10), (0, 20)], [(0, 10), (5, 20), (8, 30)], [(0, 1, 2)], [(0, 10), (50, 20), (9, 5)]]
    + [[(0, value)] for value in (10.5, float("nan"), float("inf"))],
)
def test_bad_ramps_are_refused(bad: list) -> None:
    with pytest.raises(ValueError, match="batch_ramp"):
        BatchRamp(bad)


def test_without_a_ramp_all_is_a_multiple_of_the_batch() -> None:
    plan = DataPlan(0, G, (Stage(0, T, {"a": 1.0}), Stage(5 * G + 1, 2 * T, {"a": 1.0})))
    assert plan.first_step(1) == 6 and plan.ramp.tokens(9) == 9 * G
    assert (plan.samples_per_step(5), plan.samples_per_step(6)) == (8, 4)
    assert (plan.steps_alike(2), plan.steps_alike(6)) == (4, None)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_ramp_cuts_the_same_stream_otherwise(folder, world_size, num_workers) -> None:
    """The k-th window is the same as under a constant batch; loss_tokens counts the step's labels."""
    constant = attach(make(folder)).train_dataloader()
    wanted = torch.cat([batch["input_ids"] for batch in itertools.islice(constant, 6)])
    loaders = [
        iter(attach(make(folder, batch_ramp=RAMP, num_workers=num_workers), rank, world_size).train_dataloader())
        for rank in range(world_size)
    ]
    got = []
    for windows in batches(10):
        micro = [[next(loader) for _ in range(windows // 2)] for loader in loaders]
        step = [batch for rank in micro for batch in rank]
        got += [batch["input_ids"] for batch in step]
        labels = sum(int((batch["labels"] >= 0).sum()) for batch in step)
        assert all(batch["loss_tokens"] == pytest.approx(labels / len(step)) for batch in step)
    assert torch.equal(torch.cat(got), wanted[: sum(batches(10))])


def test_a_real_run_accumulates_more_as_the_batch_grows(folder) -> None:
    constant = attach(make(folder)).train_dataloader()
    wanted = torch.cat([batch["input_ids"] for batch in itertools.islice(constant, 8)])
    module, data, trainer = fit(folder, 12, batch_ramp=RAMP)
    assert trainer.global_step == 12 and data.accumulate == trainer.accumulate_grad_batches == 4
    assert [len(ids) for ids in module.by_step().values()] == batches(12)
    assert torch.equal(torch.cat([ids for _, ids in module.seen]), wanted[: sum(batches(12))])
    state = data.state_dict()
    assert state["tokens"] == sum(batches(12)) * T and state["samples"] == sum(batches(12))


@pytest.mark.parametrize(("cut", "micro"), [(4, 1), (6, 2), (7, 1), (10, 2)])
def test_resume_inside_the_ramp(folder, tmp_path, cut, micro) -> None:
    whole = fit(folder, 12, batch_ramp=RAMP)[0].by_step()
    _, _, trainer = fit(folder, cut, batch_ramp=RAMP)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module, data, trainer = fit(folder, 12, tmp_path / "a.ckpt", batch_ramp=RAMP, micro_batch_size=micro)
    assert trainer.global_step == 12 and data.accumulate == 8 // micro
    resumed = module.by_step()
    assert sorted(resumed) == list(range(cut, 12))
    for step, ids in resumed.items():
        assert torch.equal(ids, whole[step]), step


def test_a_checkpoint_from_inside_a_step_of_the_ramp(folder, tmp_path) -> None:
    """After 9 micro-batches: 6 steps of 1, one of 2, and the first half of the next, which starts over."""
    whole = fit(folder, 10, batch_ramp=RAMP)[0].by_step()

    class SaveOnce(SaveAt):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if len(module.seen) == 9:
                trainer.save_checkpoint(self.path)

    fit(folder, 10, callbacks=[SaveOnce(tmp_path / "a.ckpt", 9)], batch_ramp=RAMP)
    resumed = fit(folder, 10, tmp_path / "a.ckpt", batch_ramp=RAMP)[0].by_step()
    assert sorted(resumed) == [7, 8, 9]
    assert all(torch.equal(ids, whole[step]) for step, ids in resumed.items())


def test_mistakes_are_one_line(folder) -> None:
    def error(**changes) -> str:
        with pytest.raises(ValueError) as caught:
            attach(make(folder, **changes))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "make them equal" in error(batch_ramp=[[0, 2 * T], [8 * T, 4 * T]])
    assert "nearest that works is 64" in error(batch_ramp=[[0, 4 * T - 3], [16 * T, G]])
    assert "batch_ramp: 96 tokens a step" in error(
        batch_ramp=[[0, 4 * T], [16 * T, 6 * T], [40 * T, G]], micro_batch_size=4
    )
    state = attach(make(folder, batch_ramp=RAMP), step=7).state_dict()
    changed = [[0, 2 * T], [16 * T, 4 * T], [24 * T, G]]
    with pytest.raises(ValueError, match="batch_ramp up to here"):
        attach(make(folder, batch_ramp=changed), step=7).load_state_dict(state)
    attach(make(folder, batch_ramp=[*RAMP[:2], [40 * T, G]]), step=7).load_state_dict(
        state
    )  # what is to come may change
