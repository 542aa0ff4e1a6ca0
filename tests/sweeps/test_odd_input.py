"""Odd files, options and places: one line that says what is wrong, and never a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from lm.errors import ConfigError
from recipes.command import exit_status
from sweeps import fit, forecast, ledger, report
from sweeps.files import write_text
from sweeps.outcome import read_decision
from sweeps.records import read_runs
from sweeps.scaling.analysis import analyse
from sweeps.scaling.isoflop import fit_curve
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
    assert "Is a directory" in capsys.readouterr().err
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
