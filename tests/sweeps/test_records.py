"""Run tables from CSV and from a real MLflow store."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from plugins.loggers import tracking
from sweeps import mlflow_runs
from sweeps.fit import warn_of_mixture
from sweeps.records import read_runs
from sweeps.where import row_filter
from tests.sweeps.scaling_helpers import mlflow_store

CSV = """id,params,tokens,loss,group,flag,budget
a,1000,1e6,3.5,x,True,6e9
b,2000,5e5,3.4,x,False,6e9
c,4000,2.5e5,nan,y,False,6e9
d,,2.5e5,3.3,y,False,6e9
"""
COLUMNS = {"n": "params", "d": "tokens", "run": "id", "budget": "budget"}


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(CSV)
    return path


def test_csv_with_named_columns(csv_file: Path) -> None:
    table = read_runs(str(csv_file), COLUMNS)
    assert [run.run for run in table.runs] == ["a", "b"]
    assert table.c == pytest.approx([6e9, 6e9]) and table.convention == "6ND"
    assert table.runs[0].extra == {"group": "x", "flag": True}
    assert {e.run: e.reason for e in table.excluded} == {"c": "loss is NaN (diverged)", "d": "params is missing"}


def test_where_keeps_rows(csv_file: Path) -> None:
    assert [r.run for r in read_runs(str(csv_file), COLUMNS, "flag == True").runs] == ["a"]
    assert [r.run for r in read_runs(str(csv_file), COLUMNS, "group in ('x',) and params > 1500").runs] == ["b"]
    assert [r.run for r in read_runs(str(csv_file), COLUMNS, "not (params < 1500 or group == 'y')").runs] == ["b"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("colour == 1", "no column 'colour'; columns are id, params"),
        ("params >", "is not an expression"),
        ("__import__('os')", "only columns, constants, comparisons"),
        ("params.real > 1", "only columns, constants, comparisons"),
    ],
)
def test_where_that_cannot_be_read_is_named(csv_file: Path, where: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_runs(str(csv_file), COLUMNS, where)


def test_missing_value_is_neither_above_nor_below() -> None:
    keep = row_filter("params > 5")
    assert not keep({"params": None}) and keep({"params": 6.0})


def test_missing_columns_and_files_are_named(csv_file: Path) -> None:
    with pytest.raises(ValueError, match=r"has no column 'N_params' \(--columns.n\); it has id, params"):
        read_runs(str(csv_file))
    with pytest.raises(ValueError, match=r"no file .*nothing.csv"):
        read_runs("nothing.csv")


# MLflow


@pytest.fixture(scope="module")
def store() -> str:
    uri = mlflow_store()
    client = mlflow_runs.client(uri)
    client.create_experiment("grid")
    cell(uri, "good", {"val_loss": 3.0})
    cell(uri, "again", {"val_loss": 2.0}, start=1)
    cell(uri, "again", {"val_loss": 2.5}, start=2)
    cell(uri, "again", {"val_loss": 9.0}, status="FAILED", start=3)
    cell(uri, "nan", {"val_loss": math.nan})
    cell(uri, "inf", {"val_loss": math.inf})
    cell(uri, "lost", {"val_loss": 3.0}, status="KILLED")
    cell(uri, "blown", {"val_loss": 8.0}, tag="diverged")
    cell(uri, "silent", {"loss": 3.0})
    cell(uri, "elsewhere", {"val_loss": 3.0}, parent="other")
    cell(uri, "no cell", {"val_loss": 3.0}, kind="fit")
    return uri


def cell(
    uri: str,
    name: str,
    metrics: dict[str, float],
    status: str = "FINISHED",
    tag: str = "complete",
    kind: str = "cell",
    parent: str = "sweep",
    start: int | None = None,
) -> str:
    client = mlflow_runs.client(uri)
    experiment = mlflow_runs.experiment_id(client, "grid")
    tags = {"scalewright.kind": kind, "scalewright.cell_id": name, "scalewright.status": tag}
    run = client.create_run(experiment, start_time=start, tags={**tags, "mlflow.parentRunId": parent})
    for key, value in {
        "n_params": 1000, "d_tokens": 1_000_000, "c_flops": 6e9, "budget_flops": 6e9, "cell_id": name,
        "flops_convention": "6N", "lr": 0.01,
    }.items():  # fmt: skip
        client.log_param(run.info.run_id, key, value)
    for key, value in metrics.items():
        client.log_metric(run.info.run_id, key, 99.0, step=0)
        client.log_metric(run.info.run_id, key, value, step=1)
    client.set_terminated(run.info.run_id, status)
    return str(run.info.run_id)


def test_mlflow_rows_and_reasons(store: str) -> None:
    table = read_runs("mlflow:grid", tracking_uri=store, parent_run_id="sweep")
    assert {run.run.split()[0]: run.loss for run in table.runs} == {"good": 3.0, "again": 2.5}
    assert table.convention == "6N"
    assert table.runs[0].extra["lr"] == 0.01
    reasons = sorted((e.run.split()[0], e.reason) for e in table.excluded)
    assert reasons == [
        ("again", "older run of a cell that was run again"),
        ("again", "run is failed, not finished"),
        ("blown", "cell is diverged"),
        ("inf", "loss is infinite (diverged)"),
        ("lost", "run is killed, not finished"),
        ("nan", "loss is NaN (diverged)"),
        ("silent", "val_loss is missing"),
    ]


def test_all_sweeps_of_an_experiment_unless_one_is_named(store: str) -> None:
    names = {run.run.split()[0] for run in read_runs("mlflow:grid", tracking_uri=store).runs}
    assert names == {"good", "again", "elsewhere"}


def test_every_page_is_read(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "PAGE", 3)
    assert len(mlflow_runs.search_all(mlflow_runs.client(store), "grid")) == 11


def test_unknown_experiment_is_named(store: str) -> None:
    with pytest.raises(ValueError, match=r"no experiment 'gird'; it has .*grid"):
        read_runs("mlflow:gird", tracking_uri=store)


def test_cells_of_several_sweeps_are_told(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_mixture(read_runs("mlflow:grid", tracking_uri=store, parent_run_id="sweep"))
    assert capsys.readouterr().err == ""
    table = read_runs("mlflow:grid", tracking_uri=store)
    warn_of_mixture(table)
    assert "of 2 sweeps are fitted together; take one with --sweep RUN_ID, of other, sweep" in capsys.readouterr().err


def test_optional_columns_become_typed_attributes(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("N_params,D_tokens,loss,lr,global_batch_tokens,U_unique_tokens,width,source\n"
                    "1000,1e6,3.5,3e-4,2048,5e5,64,wiki\n2000,5e5,3.4,,x,,128,\n")  # fmt: skip
    table = read_runs(str(path), {"d_model": "width"})
    first, second = table.runs
    assert (first.lr, first.batch_tokens, first.unique_tokens, first.d_model) == (3e-4, 2048, 5e5, 64)
    assert (first.source, first.n_layers) == ("wiki", None)
    assert (second.lr, second.batch_tokens, second.unique_tokens, second.source) == (None, None, None, None)
    assert first.extra["lr"] == 3e-4 and math.isnan(table.optional("lr")[1])
    with pytest.raises(ValueError, match=r"no column 'depth' \(--columns.n_layers\)"):
        read_runs(str(path), {"n_layers": "depth"})
