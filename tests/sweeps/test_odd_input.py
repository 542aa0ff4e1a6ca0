"""Odd files, options and places: one line that says what is wrong, and never a traceback."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from lm.config import ModelConfig
from lm.errors import ConfigError
from recipes.command import exit_status
from recipes.files import write_text
from sweeps import fit, forecast, ledger, report
from sweeps import next as next_cells
from sweeps.fit_report import FitReport
from sweeps.outcome import read_decision
from sweeps.records import read_runs
from sweeps.scaling.analysis import analyse
from sweeps.scaling.isoflop import fit_curve, nearest_to_lowest
from sweeps.scaling.table import RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, surface

HEADER = "N_params,D_tokens,C_flops,loss"


def lines(change: Callable[[list[str]], str] = ",".join) -> str:
    """A good table of 4 budgets x 5 sizes, a row changed on its way to text."""
    table = grid(surface(*HOFFMANN), sizes=5)
    rows = [[repr(float(v)) for v in (r.n_params, r.d_tokens, r.c_flops, r.loss)] for r in table.runs]
    return "\n".join([HEADER, *map(change, rows)]) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + lines().encode(),
        lines().replace(",", ";").encode(),
        lines().replace(",", "\t").encode(),
        lines().replace(",", ", ").encode(),
        lines().replace("\n", "\r\n").encode(),
        lines().replace("\n", "\n\n").encode(),
    ],
    ids=["bom", "semicolons", "tabs", "spaces", "crlf", "blank lines"],
)
def test_files_as_people_save_them_are_read(content: bytes, tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain.csv", tmp_path / "odd.csv"
    plain.write_text(lines())
    odd.write_bytes(content)
    expected, found = read_runs(str(plain)), read_runs(str(odd))
    assert len(expected) > 10 and not found.excluded
    assert np.array_equal(found.loss, expected.loss) and np.array_equal(found.n, expected.n)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (lines().encode("utf-16"), "is not UTF-8 text"),
        (b"N_params,D_tokens,loss\n" + b"1" * 200_000 + b",2,3\n", "is not a CSV file: line 2"),
        (f"{HEADER},loss\n1,2,3,4,5\n".encode(), "columns named more than once: loss"),
        (f"{HEADER}\n".encode(), "no rows were read"),
        (f"{HEADER}\n1,2,3,4,5\n".encode(), "line 2: more than the header's 4 values"),
        (lines(lambda row: ",".join([*row[:3], "abc"])).encode(), "line 2: loss is 'abc', not a number"),
        (lines(lambda row: ",".join([*row[:3], "1e200"])).encode(), "loss is 1e.200 nats per token"),
        (lines(lambda row: ",".join([*row[:3], "1e-300"])).encode(), "loss is 1e-300 nats per token"),
        (lines(lambda row: ",".join(["1e200", *row[1:]])).encode(), "N is 1e.200, which no run has"),
        (
            lines(lambda row: ",".join([*row[:3], "3.0"])).encode(),
            "parametric_linear cannot tell anything from one loss",
        ),
    ],
)
def test_files_without_an_answer_say_why(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    assert fit.main(["--runs", str(path), "--bootstrap", "0"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1 and not recwarn.list


@pytest.mark.parametrize(
    "option",
    ["--budget=0", "--budget=-1", "--budget=nan", "--budget=inf", "--bootstrap=-5", "--bootstrap=1", "--seed=-1",
     "--max-excess=-1", "--max-excess=nan", "--noise-sd=-1", "--noise-sd=nan"],
)  # fmt: skip
def test_options_that_mean_nothing(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(lines())
    assert fit.main(["--runs", str(path), option]) == 2
    assert f"error: {option.partition('=')[0]} is " in capsys.readouterr().err


def test_rounding_copies_and_names_change_nothing(tmp_path: Path) -> None:
    rows = [(r.n_params, r.d_tokens, r.c_flops, r.budget, r.loss) for r in grid(surface(*HOFFMANN), sizes=5).runs]
    path = tmp_path / "runs.csv"

    def read(table: list[tuple[object, ...]]) -> RunTable:
        path.write_text(
            "\n".join(["N_params,D_tokens,C_flops,C_budget,loss,run", *(",".join(map(str, r)) for r in table)])
        )
        return read_runs(str(path))

    plain = read([(*row, f"run {i}") for i, row in enumerate(rows)])
    jitter = read([(n, d, c, b * (1 + 1e-3 * (i % 5)), y, f"run {i}") for i, (n, d, c, b, y) in enumerate(rows)])
    assert np.allclose(jitter.budgets, plain.budgets, rtol=5e-3) and len(jitter.budgets) == len(plain.budgets)
    twice = read([(*row, f"run {i}") for i, row in enumerate(rows)] * 2)
    assert twice.runs == plain.runs and len(twice.excluded) == len(rows)
    assert "line 27 repeats line 2" in twice.excluded[0].reason
    for name in ("", "all of them"):  # no run has several N: such a name is none
        assert np.array_equal(read([(*row, name) for row in rows]).clusters, plain.clusters)


def test_the_order_of_rows_changes_nothing() -> None:
    table = grid(surface(*HOFFMANN), sizes=6, noise=0.002)
    moved = replace(table, runs=tuple(table.runs[i] for i in np.random.default_rng(0).permutation(len(table))))
    first, second = (analyse(t, ("isoflop",), [1e22], bootstrap=50).best.decisions[0] for t in (table, moved))
    assert first == second


def test_sizes_as_far_as_each_other_are_both_in() -> None:
    x, y = np.log([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), np.array([5.0, 4.0, 3.0, 4.0, 5.0, 6.0])
    for scale in (0.0, 1.7, -13.3):  # units of N
        assert nearest_to_lowest(x + scale, y, 4).tolist() == [0, 1, 2, 3, 4]


def test_one_loss_has_no_lowest() -> None:
    log_n = np.log([1e6, 2e6, 4e6, 8e6])
    assert "one loss" in fit_curve(1e15, np.arange(4), log_n, -log_n, np.full(4, 3.0), None).reason


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (forecast.main, ["--bootstrap", "0"], "gives no interval"),
        (forecast.main, ["--late"], "give --runs mlflow"),
        (forecast.main, ["--shapes", "x.yaml"], "needs --sequence-length"),
        (forecast.main, ["--global-batch-tokens", "0"], "--global-batch-tokens is 0"),
        (fit.main, ["--sweep", "abc"], "--sweep needs --runs mlflow"),
        (next_cells.main, ["--seed", "-1"], "--seed is -1"),
        (next_cells.main, ["--near", "abc"], "--near is 'abc'"),
        (next_cells.main, ["--flops", "inf"], "--flops is inf"),
        (next_cells.main, ["--approach", "isoflop", "--json", "x"], "without --config, --cells, --json"),
        (report.main, ["--out", "FOLDER"], "is a folder; name a file"),
        (next_cells.main, ["--json", "FOLDER/runs.csv/x"], "runs.csv is a file"),
    ],
)
def test_options_are_looked_at_before_the_work(
    command: Callable[[list[str]], int], options: list[str], message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "runs.csv"
    path.write_text(lines())
    options = [option.replace("FOLDER", str(tmp_path)) for option in options]
    assert command(["--runs", str(path), "--budget", "1e21", *options]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


def test_a_forecast_says_what_its_holdout_did_and_how_far_it_is() -> None:
    table = grid(surface(*HOFFMANN), sizes=6, noise=0.002)
    far = 1000 * float(table.budgets.max())
    report = FitReport("runs", analyse(table, ("parametric",), [far], bootstrap=50), 50, {})
    found = forecast.make_forecast(report, far)
    assert "1e+03 times the largest swept budget" in found.text()
    assert "widened by 2.0% for how far held-out budgets were missed" in replace(found, widened=0.02).text()
    assert "noise alone" in replace(found, holdout_err=math.nan).text()
    with pytest.raises(ValueError, match="give a smaller --global-batch-tokens"):
        forecast.make_forecast(report, far, [ModelConfig(100, 64, 2, 2)], 128, 10**30)


def test_one_budget_gives_no_law() -> None:
    table = grid(surface(*HOFFMANN), sizes=9)
    table = table.where(table.budget == table.budgets[0])
    analysis = analyse(table, bootstrap=0)
    assert not analysis.results
    assert "needs runs at several budgets" in analysis.refused["kaplan"]


def test_many_refusals_make_one_short_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    rows = [f"1e8,{d:g},{6e8 * d:g},{1.8 + 2085 / d**0.366}" for d in np.geomspace(1e9, 1e11, 40)]
    path.write_text("\n".join([HEADER, *rows]))
    assert fit.main(["--runs", str(path), "--bootstrap", "0"]) == 2
    error = capsys.readouterr().err
    assert "38 more alike" in error and len(error) < 1200


def test_a_parabola_with_its_minimum_below_zero_is_refused() -> None:
    log_n = np.log([1e6, 2e6, 4e6, 1.6e7])
    loss = np.array([9.0, 0.1, 0.1, 9.0])
    minimum = fit_curve(1e15, np.arange(4), log_n, log_n[::-1].copy(), loss, None)
    assert not minimum.ok and "minimum at a loss of -" in minimum.reason


@pytest.mark.parametrize("command", [fit.main, report.main])
def test_places_that_are_not_there(
    command: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"sqlite:///{tmp_path}/none/mlflow.db"
    assert command(["--runs", "mlflow:x", "--tracking-uri", uri]) == 2
    assert "there is no MLflow database" in capsys.readouterr().err and not (tmp_path / "none").exists()
    assert command(["--runs", "mlflow:x", "--tracking-uri", "nonsense://x"]) == 2
    assert "error: MLflow: " in capsys.readouterr().err
    (tmp_path / "garbage.db").write_text("no database")
    assert command(["--runs", "mlflow:x", "--tracking-uri", f"sqlite:///{tmp_path}/garbage.db"]) == 2
    assert "is not an SQLite database" in capsys.readouterr().err


def test_a_ledger_makes_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger.main(["--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]) == 2
    assert "there is no MLflow database" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_numbers_go_into_folders_that_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "runs.csv", tmp_path / "new" / "fit.json"
    path.write_text(lines())
    common = ["--runs", str(path), "--approach", "isoflop", "--bootstrap", "0", "--budget", "1e21"]
    assert fit.main([*common, "--json", str(out)]) == 0 and out.stat().st_size > 100
    assert fit.main([*common, "--json", str(tmp_path)]) == 2
    assert "name a file to write" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "runs.csv"]
    assert forecast.main([*common, "--json", str(path / "below")]) == 2


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.json", "old")

    def full(file: object) -> None:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("lm.data.files.sync", full)  # the bytes are there, the disk takes them no more
    assert exit_status(lambda: write_text(tmp_path / "a.json", "new")) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "old"


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "lacks"), ('{"loss": 3}', "lacks")])
def test_a_decision_that_is_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "forecast.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_decision(tmp_path)


def test_errors_of_the_program_are_not_hidden() -> None:
    def broken() -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError):
        exit_status(broken)


def test_a_package_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: import_module("no_such_package.part")) == 2
    assert "error: the package no_such_package is not installed; install it" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):  # an error of the program
        exit_status(lambda: import_module("lm.no_such_module"))
