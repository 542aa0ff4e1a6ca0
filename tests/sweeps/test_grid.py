"""The grid of an IsoFLOP sweep: arithmetic, ids, errors."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lm.errors import ConfigError
from lm.plan import flops_per_token, n_params
from sweeps.config import BatchRule, WarmupRule, load_config, parse_config
from sweeps.grid import Cell, Corpus, build_grid, grid_id
from sweeps.grid_text import epoch_warnings, grid_table
from sweeps.shapes import head_size

CORPUS = Corpus(1024, {"a": 3_000_000, "b": 1_000_000}, {"shards": "s", "tokenizer": "t"})
DEMO = Path(__file__).parents[2] / "conf" / "sweep" / "demo.yaml"
SMALL: dict[str, Any] = {
    "name": "small",
    "budgets": {"1e10": [16, 32], 3e10: [32, 64]},
    "data": {"dir": "nowhere", "sequence_length": 64},
    "model": {"n_layers": 2, "mup": {"base_width": 32, "base_d_head": 16}},
    "d_head": 16,
    "optim": {"lr": "8e-3", "schedule": {"kind": "cosine", "floor": 0.0}},
}


def small(**changes: Any) -> list[Cell]:
    return build_grid(parse_config({**SMALL, **changes}), CORPUS)


def test_demo_grid_hits_its_budgets() -> None:
    config = load_config(DEMO)
    cells = build_grid(config, CORPUS)
    assert len(cells) == 19
    assert len({cell.cell_id for cell in cells}) == 19
    for cell in cells:
        assert cell.flops == cell.tokens * flops_per_token(cell.model, 128)
        assert abs(cell.flops / cell.budget_flops - 1) < 0.01
        assert cell.tokens == cell.steps * cell.sequences * 128
        assert cell.n_params == n_params(cell.model)
        assert cell.warmup_steps == max(20, round(0.1 * cell.steps))
        assert cell.model.vocab_size == 1024
    assert not epoch_warnings(cells, config, CORPUS)


def test_every_budget_brackets_20_tokens_per_parameter_or_the_trial_minimum() -> None:
    ratios: dict[float, list[float]] = {}
    for cell in build_grid(load_config(DEMO), CORPUS):
        ratios.setdefault(cell.budget_flops, []).append(cell.tokens / cell.n_params)
    for values in ratios.values():
        assert min(values) < 6 < 15 < max(values)  # minima of such a corpus lie near 10


def test_longest_cells_come_first() -> None:
    costs = [cell.relative_cost for cell in build_grid(load_config(DEMO), CORPUS)]
    assert costs == sorted(costs, reverse=True)


def test_ids_are_stable_and_change_with_what_changes_the_result() -> None:
    base = {cell.label: cell.cell_id for cell in small()}
    assert base == {cell.label: cell.cell_id for cell in small(runs_dir="elsewhere", max_failures=0, name="other")}
    script = "from tests.sweeps.test_grid import small; print(sorted((c.label, c.cell_id) for c in small()))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(sorted(base.items()))
    changes: list[dict[str, Any]] = [
        {"optim": {**SMALL["optim"], "lr": 4e-3}},
        {"optim": {**SMALL["optim"], "weight_decay": 0.0}},
        {"model": {**SMALL["model"], "init_std": 0.1}},
        {"warmup": {"min_steps": 1, "fraction": 0.5}},
        {"batch": {"min_sequences": 3, "sequences": 12}},
        {"seeds": [1]},
        {"data": {**SMALL["data"], "validation_windows": 7}},
        {"data": {**SMALL["data"], "weights": {"a": 1, "b": 1}}},
        {"precision": "bf16-mixed"},
    ]
    for change in changes:
        assert not set(base.values()) & {cell.cell_id for cell in small(**change)}, change
    assert base == {c.label: c.cell_id for c in small(optim={**SMALL["optim"], "lr": 0.008})}
    other_data = dataclasses.replace(CORPUS, fingerprint={"shards": "x", "tokenizer": "t"})
    assert not set(base.values()) & {cell.cell_id for cell in build_grid(parse_config(SMALL), other_data)}


def test_seeds_multiply_cells_and_grid_id_ignores_order() -> None:
    cells = small(seeds=[0, 1, 2])
    assert len(cells) == 12
    assert grid_id(cells) == grid_id(cells[::-1])
    assert grid_id(cells) != grid_id(cells[1:])
    assert len(grid_table(cells).splitlines()) == 13


def test_rules() -> None:
    batch = BatchRule(sequences=4, at_tokens=4e5, exponent=0.5, min_sequences=2)
    assert [batch.sequences_for(tokens) for tokens in (1e3, 1e5, 4e5, 1.6e6)] == [2, 2, 4, 8]
    warmup = WarmupRule(min_steps=20, fraction=0.1)
    assert [warmup.steps_for(steps) for steps in (10, 100, 1000)] == [5, 20, 100]


@pytest.mark.parametrize(
    ("width", "d_head", "expected"),
    [(64, 16, 16), (40, 16, 20), (24, 16, 12), (56, 16, 14), (96, 32, 32), (16, 32, 16)],
)
def test_head_size(width: int, d_head: int, expected: int) -> None:
    assert head_size(width, d_head) == expected


BAD: list[tuple[dict[str, Any], str]] = [
    ({"budgets": {-1e10: [16]}}, "not a positive number of FLOPs"),
    ({"budgets": {"lots": [16]}}, "budgets must be a number, got 'lots'"),
    ({"budgets": {}}, "budgets is empty"),
    ({"budgets": {1e10: []}}, "needs a list of widths"),
    ({"budgets": {1e10: [16, 16]}}, "names a width twice"),
    ({"budgets": {1e10: [16.5]}}, "must be a whole number"),
    ({"budgets": {1e7: [16]}}, "min_steps is 50; drop the width"),
    ({"budgets": {1e10: [24, 37]}}, "width 37 does not divide by a head size near 16"),
    ({"budgets": {2e8: [16]}, "min_steps": 3, "tolerance": 1e-4}, "whole steps miss the budget by"),
    ({"model": {"n_layers": 2, "depth": 3}}, "unknown setting model.depth"),
    ({"model": {"d_model": 64}}, "model.d_model follows from"),
    ({"model": {"n_layers": 0}}, "model.n_layers must be positive"),
    ({"model": {"mup": {"width": 3}}}, "unknown setting model.mup.width"),
    ({"budget": {}}, "unknown setting budget"),
    ({"seeds": [0, 0]}, "seeds must be different"),
    ({"batch": {"sequences": 0}}, "batch: sequences and at_tokens must be positive"),
    ({"warmup": {"fraction": 2}}, "warmup:"),
    ({"resources": {"cpus": 0}}, "resources:"),
    ({"optim": {"lr": "fast"}}, "optim.lr must be a number"),
    ({"optim": {"weight_deacy": 0.1}}, "unknown setting optim.weight_deacy; known: name, lr, betas"),
    ({"optim": {"schedule": {"kind": "cosin"}}}, "schedule"),
    ({"optim": {"schedule": {"decay": 0.1}}}, "unknown setting optim.schedule.decay"),
    ({"optim": {"name": "muon", "muon": {"lr": "-2e-2"}}}, "optim.muon.lr must be positive"),
    ({"optim": {"betas": 0.9}}, "optim.betas must be a list"),
    ({"optim": {"betas": [0.9, "b"]}}, "optim.betas must be a number"),
    ({"optim": ["lr", 1]}, "optim must be a set of settings"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_grids_give_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.").replace("(", r"\(")) as caught:
        small(**change)
    assert "\n" not in str(caught.value)


def test_too_much_repetition_is_warned_of() -> None:
    config = parse_config(SMALL)
    cells = build_grid(config, CORPUS)
    poor = dataclasses.replace(CORPUS, train_tokens={"a": 1000, "b": 1_000_000})
    weighted = dataclasses.replace(config, data=dataclasses.replace(config.data, weights={"a": 1.0, "b": 1.0}))
    (line,) = epoch_warnings(cells, weighted, poor)
    assert "reads a " in line and "max_epochs is 4" in line


def test_bad_files_give_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for text, message in (("a: [", "is not YAML"), ("3", "holds no settings"), ("name: x", "budgets is missing")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_relative_cost_orders_by_flops_then_by_width() -> None:
    cells = {(cell.budget_flops, cell.model.d_model): cell.relative_cost for cell in small()}
    assert cells[3e10, 32] > cells[1e10, 32]
    for (_, a), (_, b) in itertools.pairwise(sorted(cells)[:2]):
        assert cells[1e10, a] > cells[1e10, b]
