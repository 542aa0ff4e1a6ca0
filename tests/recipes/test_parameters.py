"""The printed parameter table is what the optimizer gets."""

import json
from pathlib import Path

import pytest

from recipes.parameters import main
from tests.stores import new_store

DEMO = str(Path(__file__).parent.parent.parent / "conf/experiment/demo.yaml")


@pytest.fixture(autouse=True)
def _store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", new_store(tmp_path))


def test_table_of_a_muon_run(capsys) -> None:
    changed = ["--model.optim.name", "muon", "--model.optim.muon.lr", "0.01", "--model.config.d_model", "192"]
    assert main(["--config", DEMO, *changed, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["embedding.weight"] == {
        "name": "embedding.weight", "shape": "1024 x 192", "kind": "embedding", "optimizer": "adamw", "lr": "0.008",
        "weight_decay": "0", "init_std": "0.5",
    }  # fmt: skip
    up = rows["blocks.2.mlp.w_up.weight"]
    assert (up["optimizer"], up["kind"], up["weight_decay"]) == ("muon", "hidden", "0.1")
    assert float(up["lr"]) == pytest.approx(0.01 / 3**0.5, rel=1e-5)  # m = 192 / 64
    assert float(up["init_std"]) == pytest.approx(0.1 / 3**0.5, rel=1e-5)
    assert rows["norm.weight"]["init_std"] == "1 (constant)" and rows["head.weight"]["init_std"] == "0 (constant)"


def test_columns_line_up(capsys) -> None:
    assert main(["--config", DEMO]) == 0
    lines = capsys.readouterr().out.splitlines()
    column = lines[0].index("optimizer")
    assert len(lines) == 31 and {line[column:].split()[0] for line in lines[1:]} == {"adamw"}


def test_a_mistake_is_one_line(capsys) -> None:
    assert main(["--config", DEMO, "--model.optim.name", "sgd"]) == 2
    assert capsys.readouterr().err.splitlines() == ["error: optim.name must be adamw or muon, got 'sgd'"]
