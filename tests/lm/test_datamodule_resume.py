"""Checkpoints of the data module in a real trainer: resumes on other layouts, and data that is not the checkpoint's."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lm.data.plan import Stage
from tests.lm.datamodule_helpers import G, SaveAt, T, Tiny, attach, fit, make


def test_resume_twice_on_other_layouts_repeats_and_loses_nothing(folder, tmp_path) -> None:
    whole = fit(folder, 12)[0].by_step()
    assert sorted(whole) == list(range(12))

    # 5 steps of 4 micro-batches, then 8 of 1 (workers), then 2: at each resume the accumulation phase would be off.
    first, _, trainer = fit(folder, 5, micro_batch_size=2)
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    second, _, trainer = fit(folder, 9, tmp_path / "1.ckpt", micro_batch_size=8, num_workers=2)
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    third, data, trainer = fit(folder, 12, tmp_path / "2.ckpt", micro_batch_size=4)
    assert data.accumulate == 2 and trainer.accumulate_grad_batches == 2 and trainer.global_step == 12

    parts = [module.by_step() for module in (first, second, third)]
    assert [sorted(part) for part in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    for part in parts:
        for step, ids in part.items():
            assert torch.equal(ids, whole[step]), step


@pytest.mark.parametrize("batches_done", [8, 9, 10, 11])
def test_a_checkpoint_from_inside_a_run_or_a_step(folder, tmp_path, batches_done) -> None:
    """A save after any micro-batch: the step it was in starts over, the later ones are whole."""
    whole = fit(folder, 6)[0].by_step()
    fit(folder, 6, callbacks=[SaveAt(tmp_path / "a.ckpt", batches_done)], micro_batch_size=2)
    module, _, trainer = fit(folder, 6, tmp_path / "a.ckpt", micro_batch_size=4)
    assert trainer.global_step == 6
    resumed = module.by_step()
    assert sorted(resumed) == list(range(batches_done // 4, 6))
    for step, ids in resumed.items():
        assert torch.equal(ids, whole[step]), step


def test_a_second_epoch_goes_on_where_the_first_stopped(folder) -> None:
    """With limited epochs Lightning makes a new iterator each time, which must not start over."""
    whole = fit(folder, 6)[0].by_step()
    module, data = Tiny(), make(folder)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=3, limit_train_batches=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert all(torch.equal(ids, whole[step]) for step, ids in module.by_step().items())
    assert sorted(module.by_step()) == list(range(6))


def test_fingerprint_mismatch_names_the_part(folder, tmp_path) -> None:
    state = attach(make(folder), step=10).state_dict()
    attach(make(folder)).load_state_dict(state)

    def error(**changes) -> str:
        with pytest.raises(ValueError) as caught:
            attach(make(folder, **changes)).load_state_dict(state)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "plan differs from the checkpoint's: seed is 6, was 5" in error(seed=6)
    assert "global_batch_tokens is 256, was 128" in error(global_batch_tokens=256)
    assert "stage 0's sequence_length is 32, was 16" in error(sequence_length=32)
    assert "stage 0's weights is {'prose': 1.0}" in error(weights={"prose": 1})
    assert "it has 2 stages up to here, was 1" in error(stages=[Stage(2 * G, T, {"prose": 1})])
    # A stage that is still to come may be added.
    attach(make(folder, stages=[Stage(50 * G, T, {"prose": 1})])).load_state_dict(state)
    for part in ("shards", "tokenizer"):
        other = {**state, "fingerprint": {**state["fingerprint"], part: "0" * 64}}
        with pytest.raises(ValueError, match=f"the {part} in .* from the checkpoint's"):
            attach(make(folder)).load_state_dict(other)


def test_evaluation_on_other_data_needs_the_same_tokenizer_only(folder) -> None:
    state = attach(make(folder), step=10).state_dict()
    data = attach(make(folder, seed=9))
    data.trainer.state.fn = TrainerFn.VALIDATING
    data.load_state_dict({**state, "fingerprint": {**state["fingerprint"], "shards": "x"}})
    with pytest.raises(ValueError, match="tokenizer"):
        data.load_state_dict({**state, "fingerprint": {**state["fingerprint"], "tokenizer": "x"}})
