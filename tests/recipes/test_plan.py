"""recipes.plan: the 7B plan figure by figure, the search, the config it writes, what-ifs, and nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.errors import ConfigError
from lm.planner.job import Cluster, Job
from lm.planner.layout import Layout, check_layout
from lm.planner.plan import make_plan
from lm.planner.search import evaluate, search
from lm.planner.shapes import SHAPES
from lm.planner.ways import ways
from recipes.files import read_config
from recipes.plan import assignments, main
from recipes.plan_config import job_from, override, pretrain_config, strategy_values
from recipes.plan_page import page
from recipes.plan_what_if import changes_of, compare
from tests.stores import new_store

LLAMA_7B = Path("conf/plan/llama_7b.yaml")
SMALL: dict[str, Any] = {
    "model": {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
    "tokens": 1e6,
    "sequence_length": 128,
    "global_batch_tokens": 4096,
    "cluster": {"device": "H100", "devices": 8},
}


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return make_plan(job_from(read_config(LLAMA_7B, "conf/plan/")))


def test_size_and_flops_of_the_7b(plan) -> None:
    parts, flops = plan["parameters"], plan["flops"]
    assert round(parts["attention_layer"] / 1e6, 1) == 41.9
    assert round(parts["mlp_layer"] / 1e6, 1) == 135.3
    assert round((parts["attention_layer"] + parts["mlp_layer"]) / 1e6, 1) == 177.2
    assert round((parts["embedding"] + parts["head"]) / 1e9, 2) == 1.05
    assert parts["without_norms"] == 6_721_372_160
    assert round(parts["matmul"] / 1e9, 3) == 6.196
    default = flops["conventions"]["matmul+causal_attention"]
    assert round(6 * parts["matmul"] / 1e9, 2) == 37.18
    assert round(default["per_token"] / 1e9 - 6 * parts["matmul"] / 1e9, 2) == 3.22
    assert round(default["per_token"] / 1e9, 2) == 40.40
    assert round(flops["conventions"]["6N"]["per_token"] / 1e9, 2) == 40.33
    assert f"{default['run']:.2e}" == "8.08e+22"
    assert round(flops["attention_share"], 2) == 0.08


def test_time_cost_and_batch_of_the_7b(plan) -> None:
    time, step, run = plan["time_and_cost"], plan["step"], plan["run"]
    assert f"{step['flops_per_s']:.3e}" == "1.013e+17"
    assert f"{time['seconds']:.2e}" == "7.98e+05"
    assert round(time["days"], 2) == 9.23
    assert round(time["device_hours"] / 1e3, 1) == 56.7
    assert [round(cost / 1e3) for cost in time["cost"]] == [113, 170]
    assert [round(cost / 1e3) for cost in time["cost_with_allowance"]] == [125, 187]
    assert (run["windows"], round(run["global_batch_tokens"] / 1e6, 2), run["steps"]) == (1024, 4.19, 476_837)
    assert round(step["seconds"], 2) == 1.67
    assert run["lr"] == 3e-4
    assert plan["data"]["shards_bytes"] == 8e12
    assert plan["data"]["id_bytes"] == 4


def test_layout_and_memory_of_the_7b(plan) -> None:
    layout, memory = plan["layout"], plan["memory"]
    assert (layout["strategy"], layout["replicate"], layout["shard"]) == ("hsdp", 32, 8)
    assert (layout["data_parallel"], layout["micro_batch"], layout["accumulation"]) == (256, 2, 2)
    assert round(memory["whole_state_bytes"] / 1e9, 1) == 107.5
    assert round(memory["state_bytes"] / 1e9, 1) == 13.4
    assert round(memory["unchunked_logits_bytes_per_window"] / 1e9, 1) == 2.1
    assert memory["total_bytes"] < memory["usable_bytes"] == 72e9
    job = job_from(read_config(LLAMA_7B, "conf/plan/"))
    one = evaluate(job, Layout("hsdp", 256, 8, micro_batch=1, accumulation=4, reduce_every=True)).memory
    assert 18e9 < one.activations < 22e9
    assert one.total == pytest.approx(40e9, rel=0.15)  # the fact is "about 40 GB"; the recipe's own sum is 45


def test_ways_to_divide_the_7b(plan) -> None:
    """The communication figures of the worked plan, micro-batch 1: GB and seconds against computing."""
    rows = {way.name.split(",")[0]: way for way in ways(job_from(read_config(LLAMA_7B, "conf/plan/")), 1)}
    got = [(way.ranks, way.link, round(way.sent_bytes / 1e9, 1), round(way.seconds, 2)) for way in rows.values()]
    assert got[:2] == [(256, "network", 26.8, 0.54), (256, "network", 40.2, 0.80)]
    assert got[2] == (32, "network", 3.3, 0.07)  # the later of HSDP's two
    tensor = rows["tensor"]
    assert (round(tensor.sent_bytes / 1e9, 1), round(1e3 * tensor.seconds), round(1e3 * tensor.compute_seconds)) == (
        7.5, 17, 52,
    )  # fmt: skip
    assert round(rows["pipeline"].sent_bytes / 1e6, 1) == 33.6
    long = job_from(override(read_config(LLAMA_7B, "conf/plan/"), {"sequence_length": 131_072}))
    ring = next(way for way in ways(long, 1) if way.name.startswith("context"))
    assert round(ring.sent_bytes / 32 / 1e6) == 470
    assert plan["pipeline"] == {"stages": 8, "micro_batches": 16, "bubble": 7 / 23}
    assert ways(job_from(override(SMALL, {"cluster.devices": 1})), 1) == []


def test_reliability_and_loss_of_the_7b(plan) -> None:
    values, loss = plan["reliability"], plan["loss"]
    assert round(values["expected_interruptions"], 1) == 1.1
    assert round(values["checkpoint_bytes_with_bf16_copy"] / 1e9) == 94
    assert values["checkpoint_bytes"] == 12 * plan["parameters"]["total"]
    assert round(loss["predicted"], 3) == 2.023
    assert round(loss["optimal"]["n_params"] / 1e9, 1) == 13.2
    assert round(loss["optimal"]["loss"], 3) == 2.016


def test_epochs_follow_from_weights() -> None:
    """10% of 2T on 50B unique tokens are 4 epochs."""
    sources = {"most": {"weight": 9, "unique_tokens": 4e12}, "little": {"weight": 1, "unique_tokens": 5e10}}
    rows = make_plan(job_from({**read_config(LLAMA_7B, "conf/plan/"), "sources": sources}))["data"]["sources"]
    assert rows[1]["epochs"] == pytest.approx(4)


def test_page_and_json_hold_the_same_figures(plan, capsys) -> None:
    text = page(plan)
    for said in ("6,721,638,400 parameters", "9.23 days", "hsdp 32 x 8", "$125k to $187k", "2.023", "2.50"):
        assert said in text, said
    assert main(["--config", str(LLAMA_7B), "--json", "--set", "cluster.devices=128"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["time_and_cost"]["days"] == pytest.approx(2 * plan["time_and_cost"]["days"])


def test_what_if_against_the_base(plan) -> None:
    values = read_config(LLAMA_7B, "conf/plan/")
    rows = {row["what"]: row for row in compare(values, plan, changes_of(values, []))}
    assert list(rows) == ["base", "half the devices", "32k context", "fp8", "13B"]
    base = rows["base"]
    assert rows["half the devices"]["days"] == pytest.approx(2 * base["days"])
    assert rows["half the devices"]["device_hours"] == pytest.approx(base["device_hours"])
    # 128 windows of 32k on 256 devices: each has to be cut
    assert "context" in rows["32k context"]["layout"]
    assert rows["32k context"]["flops"] / base["flops"] == pytest.approx((37.18 + 8 * 3.22) / 40.40, rel=1e-3)
    assert 0.5 < rows["fp8"]["days"] / base["days"] < 0.7  # blocks twice as fast, attention and head as before
    assert rows["13B"]["n_params"] > 13e9
    assert rows["13B"]["loss"] < base["loss"]
    wrong = compare(values, plan, {"x": assignments("cluster.devices=100")})[1]
    assert wrong["error"].startswith("cluster.devices 100 does not divide")


def test_search_follows_the_design_order() -> None:
    """Small: ddp. Too large for a device: sharded inside the node. Windows that do not fit: cut by context."""
    small = search(job_from(SMALL)).best.layout
    assert (small.strategy, small.accumulation) == ("ddp", 1)
    values = read_config(LLAMA_7B, "conf/plan/")
    medium = search(job_from(override(values, {"cluster.network_gb_per_s": 10}))).best.layout
    assert (medium.strategy, medium.shard) == ("hsdp", 8)
    long = search(job_from(override(values, {"sequence_length": 131_072}))).best.layout
    assert long.context > 1
    kept = search(job_from(override(values, {"layout.strategy": "zero3"}))).best.layout
    assert kept.strategy == "zero3"


def test_the_chosen_layout_is_the_fastest_that_fits() -> None:
    job = job_from(override(read_config(LLAMA_7B, "conf/plan/"), {"cluster.device": "A100", "cluster.devices": 64}))
    choice = search(job)
    assert choice.best.memory.total <= job.cluster.usable_bytes
    for other in choice.runners_up:
        assert other.time.total >= 0.99 * choice.best.time.total
        assert other.memory.total <= job.cluster.usable_bytes
    few = {"cluster.device": "RTX 4090", "cluster.devices": 4, "cluster.devices_per_node": 4}
    with pytest.raises(ConfigError, match=r"nothing fits 21\.6 usable GB"):
        search(job_from(override(read_config(LLAMA_7B, "conf/plan/"), few)))


def test_a_budget_gives_the_optimal_size() -> None:
    job = job_from(read_config(Path("conf/plan/budget.yaml"), "conf/plan/"))
    assert job.tokens == pytest.approx(91.4e9, rel=3e-3)
    assert make_plan(job)["parameters"]["total"] == pytest.approx(1.824e9, rel=0.1)


def test_the_loss_of_a_fit_file(tmp_path: Path) -> None:
    constants = {"A": 406.4, "B": 410.7, "E": 1.69, "alpha": 0.34, "beta": 0.28}
    path = tmp_path / "fit.json"
    path.write_text(json.dumps({"results": {"isoflop": {"a": 0.5}, "parametric": {"a": 0.45, "fit": constants}}}))
    values = {**read_config(LLAMA_7B, "conf/plan/"), "loss": {"fit": str(path)}}
    assert make_plan(job_from(values))["loss"]["predicted"] == pytest.approx(2.0228, abs=1e-4)
    path.write_text(json.dumps({"results": {"isoflop": {"a": 0.5}}}))
    with pytest.raises(ConfigError, match="holds no parametric fit"):
        job_from(values)


def test_the_written_config_builds(tmp_path: Path, capsys, monkeypatch) -> None:
    """What --out writes is a run of recipes.pretrain: parsed and built, on the CPU as there is no GPU here."""
    import os

    from recipes.build import build

    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path))
    path = tmp_path / "run.yaml"
    assert main(["--config", str(LLAMA_7B), "--out", str(path)]) == 0
    config = yaml.safe_load(path.read_text())
    assert config["trainer"]["num_nodes"] * config["trainer"]["devices"] == 256
    # one node, and the accelerator of this machine
    config["trainer"] |= {"accelerator": "cpu", "num_nodes": 1}
    config["trainer"]["strategy"]["init_args"]["replicate"] = 1
    config["runs_dir"] = os.fspath(tmp_path / "runs")
    parts = build(config)
    strategy: Any = parts.trainer.strategy
    assert (strategy.strategy_name, strategy.shard, strategy.reduce_every_micro_batch) == ("hsdp", 8, True)
    assert parts.module.model_config.n_kv_heads == 8
    assert parts.module.model_config.d_ff == 11_008
    assert parts.data.requested_micro_batch_size == 2
    assert parts.trainer.max_steps == 476_837
    names = [type(callback).__name__ for callback in parts.trainer.callbacks]  # type: ignore[attr-defined]
    assert "YoungCheckpoint" in names


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout("ddp", 8), "ddp"),
        (Layout("zero2", 8), "zero2"),
        (Layout("fsdp", 8, 4, tensor=2), {"tensor_parallel": 2}),
        (Layout("zero1", 8, context=2), {"context_parallel": 2, "stage": 1}),
        (Layout("hsdp", 8, 4), {"replicate": 2, "shard": 4}),
    ],
)
def test_strategies_in_the_words_of_the_trainer(layout: Layout, expected: Any) -> None:
    values = strategy_values({**vars(layout), "replicate": layout.replicate})
    assert (values if isinstance(values, str) else values["init_args"]) == expected


NONSENSE = [
    ({"model.n_layers": 0}, "model.n_layers must be a whole number above 0, got 0"),
    ({"model.d_ff": 1e300}, "model.d_ff must be a whole number above 0 and at most 1e+15"),
    ({"model.d_model": 65}, "model.d_model 65 does not divide by n_heads 4"),
    ({"model.n_kv_heads": 3}, "model.n_heads 4 does not divide by n_kv_heads 3"),
    ({"model": {"shape": "llama_9"}}, "model.shape 'llama_9' is unknown; take one of llama_2_7b"),
    ({"model": {"d_model": 64}}, "model lacks vocab_size, n_layers, n_heads"),
    ({"global_batch_tokens": 128}, "the batch has 1 windows of 128 tokens for 8 devices"),
    ({"global_batch_tokens": 512, "layout.strategy": "ddp", "layout.context": 1}, "the batch has 4 windows of 128"),
    ({"global_batch_tokens": 4097}, "global_batch_tokens 4097 is no multiple of sequence_length 128"),
    ({"global_batch_tokens": 128 * 9}, "a batch of 9 windows cannot be dealt out over 8 devices"),
    ({"tokens": -1}, "tokens must be a number above 0, got -1"),
    ({"tokens": 10}, "tokens 10 is less than one optimizer step"),
    ({"tokens": "many"}, "tokens must be a number above 0, got 'many'"),
    ({"cluster.price_per_hour": -2}, "cluster.price_per_hour lowest must be a number from 0 on, got -2"),
    ({"cluster.price_per_hour": [3, 2]}, "cluster.price_per_hour must be [lowest, highest], got [3, 2]"),
    ({"cluster.devices": 0}, "cluster.devices must be a whole number above 0, got 0"),
    ({"cluster.devices": 12}, "cluster.devices 12 does not divide by devices_per_node 8"),
    ({"cluster.device": "H900"}, "cluster.device 'H900' is unknown; take one of A100"),
    ({"cluster.mfu": 40}, "cluster.mfu is a share of the peak, at most 1, got 40"),
    ({"cluster.mfu": float("nan")}, "cluster.mfu must be a number above 0, got nan"),
    ({"cluster.colour": "red"}, "cluster.colour is unknown; there are"),
    ({"cluster.device": "A100", "precision": "fp8"}, "cluster.device A100 has no fp8; it has fp32, bf16"),
    ({"precision": "int4"}, "precision must be one of 32-true, bf16-mixed, fp8, got 'int4'"),
    ({"loss": {"E": 1.7}}, "loss lacks A, B, alpha, beta"),
    ({"loss": {"fit": "nowhere.json"}}, "loss.fit nowhere.json: cannot be read as JSON"),
    ({"layout.strategy": "pipeline"}, "layout.strategy must be one of single, ddp"),
    ({"layout.colour": 1}, "layout.colour is unknown"),
    ({"sources": {"web": {"weight": 1}}}, "sources.web must have weight and unique_tokens"),
    ({"sources": {"web": {"weight": 0, "unique_tokens": 1}}}, "sources.web weight must be a number above 0"),
    ({"budget_flops": 1e18}, "a plan needs either tokens or budget_flops"),
    ({"depth": 3}, "depth is unknown; there are"),
    ({"tokens": 1e308}, "tokens must be a number above 0 and at most 1e+30, got 1e+308"),
    ({"cluster.devices": 10**8}, "cluster.devices must be at most 1,000,000, got 100,000,000"),
    ({"flops_convention": [1]}, "flops_convention must be a word, got [1]"),
    ({"name": "a/b"}, "name must name a folder, without /, got 'a/b'"),
    ({"layout": False}, "layout must be a section of settings to keep, got False"),
    ({"loss": {"E": 1, "A": True, "B": 1, "alpha": 0.3, "beta": 0.3}}, "loss.A must be a positive number, got True"),
    ({"loss": {"E": 1, "A": 1, "B": 1, "alpha": 1e-9, "beta": 0.3}}, "loss.alpha is an exponent, from 0.001 to 10"),
]


@pytest.mark.parametrize(("changes", "message"), NONSENSE, ids=[message[:40] for _, message in NONSENSE])
def test_nonsense_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(override(SMALL, changes)))
    assert main(["--config", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {message}"), said.err
    assert said.err.count("\n") == 1


def test_no_config_and_no_file(capsys) -> None:
    assert main([]) == 2
    assert main(["--config", "conf/plan/none.yaml"]) == 2
    assert main(["--config", str(LLAMA_7B), "--set", "devices"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "does not exist; examples are in conf/plan/" in lines[1]
    assert lines[2] == "error: 'devices' is not KEY=VALUE, such as cluster.devices=128"


def test_values_of_the_command_line(tmp_path: Path, capsys) -> None:
    """Lists, whole numbers written as floats, and brackets left open."""
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    values = ["cluster.devices=8.0", "model.n_layers=3.0", "cluster.price_per_hour=[2, 3],tokens=2e6"]
    assert main(["--config", str(path), "--json", "--set", *values]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["cluster"]["price_per_hour"], plan["model"]["n_layers"], plan["run"]["tokens"]) == ([2, 3], 3, 2e6)
    nested = assignments("sources={a: {weight: 1, x: 2}, b: {weight: 1e12}},y=[[1, 2], [3]],name=nan")
    assert nested == {
        "sources": {"a": {"weight": 1, "x": 2}, "b": {"weight": 1e12}},
        "y": [[1, 2], [3]],
        "name": "nan",
    }
    assert main(["--config", str(path), "--set", "cluster.price_per_hour=[2"]) == 2
    assert "is not YAML; quote it, or close its brackets" in capsys.readouterr().err
    assert main(["--config", str(path), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is a folder; name a file to write\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["[]", '{"results": []}', '{"results": {"a": 3}}', "[" * 100_000, "\xff"])
def test_odd_files_of_a_fit_and_of_a_device(text: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**SMALL, "cluster": {"device": "H100", "devices": 1}}))
    odd = tmp_path / "odd.json"
    odd.write_bytes(text.encode("latin-1"))
    for key, message in (("loss.fit", f"error: loss.fit {odd}"), ("cluster.device", f"error: cluster.device {odd}")):
        assert main(["--config", str(tmp_path / "plan.yaml"), "--set", f"{key}={odd}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(message) and error.count("\n") == 1, error


def test_layouts_that_the_recipe_cannot_run() -> None:
    job = Job("x", SHAPES["llama_3_8b"], 1e12, 4096, 256 * 4096, Cluster("H100", 64))
    for layout, message in (
        (Layout("ddp", 64, tensor=2, micro_batch=8), "tensor needs fsdp or hsdp"),
        (Layout("fsdp", 64, 4, tensor=16, micro_batch=64), "n_kv_heads 8 does not divide by tensor 16"),
        (Layout("ddp", 64, micro_batch=3), "is not 64 parts x micro-batch 3"),
        (Layout("fsdp", 64, 7), "do not divide 64 devices"),
        (Layout("single", 64), "runs on one device"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_layout(job, layout)


def test_config_of_a_small_plan_names_its_sizes() -> None:
    job = job_from(SMALL)
    config = pretrain_config(job, make_plan(job))
    assert config["model"]["config"] == {
        "vocab_size": 512,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 176,
    }
    assert config["trainer"]["strategy"] == "ddp"


def test_plots_are_drawn(plan, tmp_path: Path) -> None:
    from recipes.plan_plots import plot

    paths = plot(plan, tmp_path / "plots")
    assert [path.name for path in paths] == ["memory.png", "time.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in paths)


def test_a_named_shape_made_narrower_keeps_whole_heads(tmp_path: Path, capsys) -> None:
    """The head size follows from width and heads; it does not stay that of the named shape."""
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(override(SMALL, {"model": {"shape": "llama_2_7b", "d_model": 2048}})))
    assert main(["--config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["d_head"] == 64
