"""Stages through the command line: the shipped 128k config's plan, the table of a run, cooldown branches of a trunk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from lm.data.synthetic import write_folder
from lm.rope_stages import config_at
from plugins.callbacks.long_context import LongContext
from tests.recipes.test_pretrain import folder, history, mlflow_run, pretrain  # noqa: F401

ROOT = Path(__file__).parents[2]
ANNEAL = {"class_path": "plugins.callbacks.wsd_anneal.WSDAnneal", "init_args": {"weights": {"code": 1.0}}}
LONG = {
    "class_path": "plugins.callbacks.long_context.LongContext",
    "init_args": {
        "stages": [
            {
                "from_tokens": 1024,
                "sequence_length": 64,
                "rope_theta": 5e5,
                "rope_scaling": {"kind": "linear", "factor": 2.0},
                "weights": {"prose[>=40]": 1.0, "code": 2.0},
            }
        ]
    },
}
DEFAULTS = [
    {"class_path": "plugins.callbacks.throughput.Throughput"},
    {"class_path": "plugins.callbacks.checkpoint.PeriodicCheckpoint", "init_args": {"every_n_steps": 8}},
]


def test_8k_to_128k_in_six_stages(tmp_path: Path) -> None:
    """The shipped config parses, and its plan on 8 ranks is what its comments say."""
    from lm.data.layout import micro_batches
    from recipes.build import parse

    rng = np.random.default_rng(0)
    lengths = [40_000] * 12 + [1000] * 300
    web = [np.append(rng.integers(1, 300, length - 1, dtype=np.uint32), 0) for length in lengths]
    write_folder(tmp_path / "web", {"web": {"train": web, "validation": web[:4]}}, vocab_size=300)
    config = ["--config", str(ROOT / "conf/experiment/llama_1b_128k.yaml"), "--data.dir", str(tmp_path / "web")]
    here = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.strategy", "single"]
    cli = parse([*config, *here, "--model.config.vocab_size", "300", "--trainer.precision", "32-true"])
    data, module, trainer = cli.datamodule, cli.model, cli.trainer
    data.trainer = trainer
    data.setup("validate")
    (long_context,) = [callback for callback in trainer.callbacks if isinstance(callback, LongContext)]
    long_context.setup(SimpleNamespace(max_steps=trainer.max_steps, datamodule=data), module, "validate")
    stages = data.plan.stages
    assert [stage.sequence_length for stage in stages] == [8192, 16384, 32768, 65536, 131072, 131072]
    assert [data.plan.samples_per_step(data.plan.first_step(i)) for i in range(6)] == [512, 256, 128, 64, 32, 32]
    assert micro_batches(data.plan, 8, data.requested_micro_batch_size) == (16, 4)
    thetas = [
        config_at(module.model_config, module.rope_changes, data.plan.ramp, data.plan.first_step(i)).rope_theta
        for i in range(6)
    ]
    assert thetas == [5e5, 1e6, 2e6, 4e6, 8e6, 8e6]
    assert dict(stages[3].weights) == pytest.approx({"web[>=16384]": 0.2, "web[<16384]": 0.8})
    assert dict(stages[5].weights) == pytest.approx({"web[>=32768]": 0.6, "web[<32768]": 0.4})
    drawn = {row.source: row.tokens_drawn for row in data.epoch_table()}
    assert sum(drawn.values()) == pytest.approx(3e10, rel=1e-3)


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_trunk_and_a_branch(folder: Path) -> None:  # noqa: F811
    """A trunk with a longer stage and an annealing mix, then a shorter cooldown with that mix from its checkpoint."""
    callbacks = yaml.safe_dump([*DEFAULTS, LONG, ANNEAL], default_flow_style=True, width=10_000).strip()
    common = ("--trainer.callbacks", callbacks, "--trainer.log_every_n_steps", "1", "--data.micro_batch_size", "2")
    wsd = ("--model.optim.schedule.kind", "wsd", "--model.optim.schedule.decay_fraction", "0.25")
    done = pretrain(folder, "--name", "trunk", *common, *wsd)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.partition("packing:")[0].splitlines()
    table = {line.split()[0]: line.split() for line in lines if line.startswith(("0 ", "1 ", "2 ", "prose", "code"))}
    assert table["0"][1:5] == ["0", "0", "32", "8"] and table["1"][1:5] == ["4", "1,024", "64", "4"]
    assert table["2"][1:] == ["12", "3,072", "64", "4", "code", "100%"]
    assert table["1"][5:] == ["code", "66.67%,", "prose[>=40]", "33.33%"]
    # Two thirds of a block of 1,024 samples are 683 whole ones.
    assert table["code"][-2] == f"{0.5 * 1024 + 683 / 1024 * 2048 + 1024:,.0f}"
    assert (folder / "runs/trunk/data.txt").read_text().strip() in done.stderr
    flops = history(folder, "trunk", "flops")
    assert flops[16] - flops[8] > flops[8] and float(mlflow_run(folder, "trunk").data.params["c_flops"]) == flops[16]
    assert {8, 16} == set(history(folder, "trunk", "val_loss_long")) == set(history(folder, "trunk", "val_loss"))

    before = files(folder / "runs/trunk")
    kind = ("--model.optim.schedule.kind", "cooldown", "--tokens", str(12 * 256))
    start = folder / "runs/trunk/checkpoints/step-00000008"
    done = pretrain(folder, "--name", "branch", *common, *kind, "--ckpt_path", str(start))
    assert done.returncode == 0, done.stderr
    rates = history(folder, "branch", "lr")
    assert list(rates) == [9, 10, 11, 12] and rates[9] > rates[12] > 0
    stage = (folder / "runs/branch/data.txt").read_text().splitlines()[3].split()
    assert stage == ["2", "8", "2,048", "64", "4", "code", "100%"]
    assert files(folder / "runs/trunk") == before
