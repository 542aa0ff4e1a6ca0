"""The benchmark of the fit: refits confirmed by scipy, the reference procedure at the same optimum."""

from __future__ import annotations

import json

import pytest

from recipes import bench
from sweeps.fit import main
from tests.sweeps.scaling_helpers import published


def test_bench_fit(capsys: pytest.CaptureFixture[str]) -> None:
    source, where = str(published("chinchilla_epoch.csv")), "excluded_by_epoch != 1"
    arguments = [
        "fit",
        "--runs",
        source,
        "--where",
        where,
        "--bootstrap",
        "300",
        "--verify",
        "8",
        "--reference",
        "0.002",
    ]
    assert bench.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["objective"] <= 0.00101828 and result["refits_certified_share"] == 1.0
    assert result["refits_confirmed_by_scipy"] == "8 of 8"
    assert result["reference"]["objective"] >= result["objective"] * (1 - 1e-6)
    assert result["times_faster"] > 10


def test_bench_fit_refuses_a_share_above_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["fit", "--reference", "2"]) != 0
    assert "--reference a share from 0 to 1" in capsys.readouterr().err


def test_fit_command_says_the_cheapest_size_for_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    source, where = str(published("chinchilla_epoch.csv")), "excluded_by_epoch != 1"
    common = ["--runs", source, "--where", where, "--approach", "parametric", "--bootstrap", "100", "--budget", "1e22"]
    assert main([*common, "--target-loss", "2.2", "--inference-tokens", "0", "1e13"]) == 0
    out = capsys.readouterr().out
    assert "parametric, 0 tokens served: N 5.59B [" in out and "parametric, 10T tokens served: N 1.58B [" in out
    assert main([*common, "--target-loss", "1.5", "--inference-tokens", "0"]) == 0
    assert "does not reach a loss of 1.5 at any size: its irreducible loss is 1.817" in capsys.readouterr().out
    assert main([*common, "--target-loss", "2.2"]) != 0
    assert "--inference-tokens and --target-loss go together" in capsys.readouterr().err


def test_fit_command_on_repeats_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    source = str(published("datablations_runs182.csv"))
    common = ["--runs", source, "--approach", "parametric", "--bootstrap", "0", "--budget", "1e22"]
    assert main([*common, "--repeats"]) == 0
    assert "repeated tokens, on the surface of 29 runs without repeats" in capsys.readouterr().out
    assert main([*common, "--rates", "1e9", "1e11"]) != 0
    assert "no run has a learning rate" in capsys.readouterr().err
