"""Stages of longer sequences in real runs: RoPE in force, resume in each stage, validation at both lengths, export."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from lm.config import ModelConfig, RuntimeConfig
from lm.data.changes import LongDocuments
from lm.data.flops import flops_until
from lm.data.plan import Stage
from lm.errors import ConfigError
from lm.plan import flops_per_token
from lm.rope_scaling import RopeScaling
from plugins.callbacks.long_context import LongContext, LongStage
from tests.stage_runs import SHAPE, G, SaveAfter, T, make_trainer, run, source_of, write_corpus

YARN = RopeScaling("yarn", factor=4.0, original_max_position=2 * T)
STEPS, SAVES = 15, (3, 7, 12)  # one in each stage
MIX = {"prose": 1.0, "code": 1.0}


def stages() -> LongContext:
    return LongContext(
        [
            LongStage(2 * T, from_tokens=5 * G, rope_theta=500_000.0),
            LongStage(
                4 * T,
                from_fraction=10 / 15,
                rope_scaling=YARN,
                weights={"code": 1.0, "reference": 1.0},
                long_documents=LongDocuments(4 * T, 0.5),
            ),
        ]
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "data"
    write_corpus(path)
    return path


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory):
    """(what each step saw, the trainer, folder of checkpoints) of a run through all stages, validated every 5 steps."""
    folder = tmp_path_factory.mktemp("whole")
    steps, trainer = run(corpus, STEPS, [stages(), SaveAfter(folder, *SAVES)], weights=MIX, val_interval=5)
    return steps, trainer, folder


def test_a_step_keeps_its_tokens_and_has_the_rope_of_its_stage(whole) -> None:
    steps, trainer, _ = whole
    assert [len(seen["input_ids"][0]) for seen in steps.values()] == [T] * 5 + [2 * T] * 5 + [4 * T] * 5
    assert {sum(map(len, seen["input_ids"])) for seen in steps.values()} == {G}
    ropes = [seen["rope"] for seen in steps.values()]
    assert ropes == [(10_000.0, None)] * 5 + [(500_000.0, None)] * 5 + [(500_000.0, YARN)] * 5
    sources = {source_of(row) for step in range(10) for row in steps[step]["input_ids"]}
    assert sources == {"prose", "code"}
    assert {source_of(row) for step in range(10, 15) for row in steps[step]["input_ids"]} == {"code", "reference"}
    plan = trainer.datamodule.plan
    by_hand = 5 * G * sum(flops_per_token(SHAPE, length) for length in (T, 2 * T, 4 * T))
    assert flops_until(SHAPE, plan, STEPS) == by_hand
    assert flops_until(SHAPE, plan, 7) == 5 * G * flops_per_token(SHAPE, T) + 2 * G * flops_per_token(SHAPE, 2 * T)


def test_half_of_each_source_comes_from_long_documents(whole) -> None:
    """In the last stage: the plan's mix, and the documents that the windows are really cut from."""
    _, trainer, _ = whole
    data = trainer.datamodule
    assert dict(data.plan.stages[2].weights) == {
        "code[>=64]": 0.5, "code[<64]": 0.5, "reference[>=64]": 0.5, "reference[<64]": 0.5,
    }  # fmt: skip
    order, T_long = data.order, 4 * T
    first = data.plan.first_step(2)
    source, window = order.locate(order.step_samples(first, 256))
    names = [order.source_names[i] for i in source.tolist()]
    assert {name: names.count(name) / len(names) for name in sorted(set(names))} == dict.fromkeys(
        ["code[<64]", "code[>=64]", "reference[<64]", "reference[>=64]"], 0.25
    )
    stream = data.train_dataloader().stream.reader
    for wanted, index in (("code[>=64]", ">="), ("code[<64]", "<")):
        i = order.source_names.index(wanted)
        batch = stream.batch(source[source == i][:40], window[source == i][:40], T_long)
        inner = [
            lengths[1:-1]  # the first and last document of a window may be cut
            for row in batch["document_ids"]
            for lengths in [torch.unique_consecutive(row, return_counts=True)[1].tolist()]
        ]
        assert all((length >= 64) == (index == ">=") for lengths in inner for length in lengths)
    rows = {row.source: row for row in data.epoch_table()}
    assert rows["code[>=64]"].tokens_drawn == 5 * G / 4
    assert rows["code[>=64]"].unique_tokens + rows["code[<64]"].unique_tokens == rows["code"].unique_tokens
    held = (rows["code[<64]"].unique_tokens - 1) // T_long * T_long
    assert rows["code[<64]"].epochs == pytest.approx(rows["code[<64]"].tokens_drawn / held)


@pytest.mark.parametrize(("saved", "workers"), [(3, 2), (7, 0), (12, 0)])
def test_resume_in_each_stage_is_the_same_run(corpus, whole, saved: int, workers: int) -> None:
    steps, _, folder = whole
    path = folder / f"step-{saved:08d}"
    resumed, _ = run(corpus, STEPS, [stages()], weights=MIX, ckpt_path=path, num_workers=workers, val_interval=5)
    assert resumed == {step: seen for step, seen in steps.items() if step >= saved}


def test_short_validation_goes_on_beside_the_long_one(whole) -> None:
    steps, trainer, _ = whole
    points = {step + 1: seen for step, seen in steps.items() if "val_loss" in seen}
    assert sorted(points) == [5, 10, 15]
    for seen in points.values():
        assert {"val_loss/prose", "val_loss/reference", "val_loss_long", "val_loss_long/prose"} <= seen.keys()
        assert seen["val_loss"] != seen["val_loss_long"]
    # The last one, computed again without the module: at T and at 4 T, with the RoPE of the last stage.
    data, module = trainer.datamodule, trainer.lightning_module
    loaders = dict(zip(data.validation_sets, data.val_dataloader(), strict=True))
    assert list(loaders) == [(suffix, name) for suffix in ("", "_long") for name in data.source_names]
    for (suffix, name), loader in loaders.items():
        nats = tokens = 0.0
        for batch in loader:
            assert batch["input_ids"].shape[1] == (4 * T if suffix else T)
            with torch.no_grad():
                logits = module.model(batch["input_ids"], batch["document_ids"]).flatten(0, 1).double()
            labels = batch["labels"].flatten()
            nats += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            tokens += int((labels >= 0).sum())
        assert points[15][f"val_loss{suffix}/{name}"] == pytest.approx(nats / tokens, rel=1e-5)


def hf_loss(folder: Path, step: dict) -> float:
    """Mean loss of transformers' Llama over the labels of a step, fed document by document."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    nats, count = 0.0, 0
    for ids, labels in zip(step["input_ids"], step["labels"], strict=True):
        ends = [i + 1 for i, token in enumerate(ids) if token == 0 and i + 1 < len(ids)]
        for start, stop in zip([0, *ends], [*ends, len(ids)], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids[start:stop]])).logits[0].double()
            wanted = torch.tensor(labels[start:stop])
            nats += float(torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum"))
            count += int((wanted >= 0).sum())
    return nats / count


@pytest.mark.parametrize("saved", SAVES)
def test_an_export_has_the_rope_of_its_step(corpus, whole, saved: int, tmp_path: Path) -> None:
    """transformers' Llama has the loss that the run logged for the next step, and only with that RoPE."""
    from recipes.export import export

    steps, _, folder = whole
    out = tmp_path / "exported"
    export(folder / f"step-{saved:08d}", out, tokenizer=corpus)
    path = out / "config.json"
    config = json.loads(path.read_text())
    theta, scaling = steps[saved]["rope"]
    assert config["rope_theta"] == theta
    if scaling is None:
        assert config["rope_scaling"] is None
        assert config["max_position_embeddings"] == {3: T, 7: 2 * T}[saved]
    else:
        assert (config["rope_scaling"]["rope_type"], config["rope_scaling"]["factor"]) == ("yarn", 4.0)
    assert hf_loss(out, steps[saved]) == pytest.approx(steps[saved]["loss"], rel=1e-5)
    if saved > 3:
        plain = {"rope_type": "default", "rope_theta": 10_000.0}
        path.write_text(json.dumps({**config, "rope_theta": 1e4, "rope_scaling": None, "rope_parameters": plain}))
        assert abs(hf_loss(out, steps[saved]) / steps[saved]["loss"] - 1) > 1e-4


@pytest.mark.parametrize("kind", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_activation_checkpointing_across_stages(corpus, whole, kind: str) -> None:
    steps, _, _ = whole
    got, _ = run(corpus, STEPS, [stages()], weights=MIX, runtime=RuntimeConfig(activation_checkpointing=kind))
    for step, seen in got.items():
        assert seen["loss"] == pytest.approx(steps[step]["loss"], rel=1e-5)
        assert seen["grad_norm"] == pytest.approx(steps[step]["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_compiled_blocks_across_stages(corpus, whole) -> None:
    steps, _, _ = whole
    got, _ = run(corpus, STEPS, [stages()], weights=MIX, runtime=RuntimeConfig(compile=True))
    for step, seen in got.items():
        assert seen["loss"] == pytest.approx(steps[step]["loss"], rel=1e-4)


def test_validate_takes_the_rope_of_the_checkpoints_stage(corpus, whole) -> None:
    from lm.datamodule import TokenDataModule
    from tests.stage_runs import Recorded

    _, _, folder = whole
    trainer = make_trainer(STEPS, [stages()])
    trainer.limit_val_batches = 1.0
    module = Recorded(SHAPE)
    data = TokenDataModule(str(corpus), T, G, 4, weights=MIX, seed=3)
    trainer.validate(module, datamodule=data, ckpt_path=folder / "step-00000012", verbose=False)
    assert module.model.rope == (500_000.0, YARN)
    assert math.isfinite(module.metrics["val_loss_long"])
    # Without the stages its RoPE is the config's, and that is told.
    plain = make_trainer(STEPS, [])
    plain.limit_val_batches = 1.0
    with pytest.warns(UserWarning, match=r"trained with rope_theta 500000.0, this run has 10000.0 there"):
        plain.validate(Recorded(SHAPE), datamodule=TokenDataModule(str(corpus), T, G, 4), verbose=False,
                       ckpt_path=folder / "step-00000012")  # fmt: skip


def test_mistakes_are_one_line(corpus: Path) -> None:
    def error(*stages: LongStage, shape: ModelConfig = SHAPE, **settings) -> str:
        with pytest.raises(ConfigError) as caught:
            run(corpus, STEPS, [LongContext(list(stages))], shape=shape, **settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    first = LongStage(2 * T, from_tokens=5 * G)
    assert "LongContext: stages must start at increasing" in error(first, LongStage(4 * T, from_tokens=4 * G + 1))
    assert "both set sequence_length at step 5" in error(first, stages=[Stage(5 * G, 4 * T, MIX)])
    assert "cannot share" in error(LongStage(8 * T, from_tokens=5 * G))
    assert "not a multiple of sequence_length 24" in error(LongStage(24, from_tokens=5 * G))
    yarn = RopeScaling("yarn", factor=2.0, original_max_position=T)
    assert "longer than the 32 positions that rope_scaling yarn reaches" in error(
        LongStage(4 * T, from_tokens=5 * G, rope_scaling=yarn)
    )
    assert "set a factor of at least 4" in error(
        LongStage(4 * T, from_tokens=5 * G), shape=dataclasses.replace(SHAPE, rope_scaling=yarn)
    )
    long = LongStage(2 * T, from_tokens=5 * G, long_documents=LongDocuments(1000))
    assert "no document of such a length" in error(long)
    for values, words in (
        ({}, "one of from_tokens and from_fraction"),
        ({"from_tokens": 5, "from_fraction": 0.5}, "one of from_tokens and from_fraction"),
        ({"from_fraction": 1.5}, "between 0 and 1"),
        ({"from_tokens": 5, "rope_theta": 0.5}, "rope_theta must be above 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            LongStage(2 * T, **values)
