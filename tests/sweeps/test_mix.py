"""Mix sweeps: settings, the ranking against independent statistics, and real Ray sweeps of whole runs and of decays."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from lm.errors import ConfigError
from plugins.loggers.sweep_ledger import TRUNK, SweepLedger
from recipes.paired import BETTER, MISSING, OPEN, UNKNOWN, WORSE
from sweeps import mix
from sweeps.grid import Corpus, grid_id
from sweeps.isoflop import read_corpus
from sweeps.mix import sweep_kind
from sweeps.mix_grid import Candidate, MixSweep, build_mix_grid, load_mix_sweep, mix_table, parse_mix_sweep
from sweeps.mix_rank import FIRST, MixRun, rank
from sweeps.mix_report import noise_line, plot_ranking, ranking_dict, ranking_text
from sweeps.specs import trial_spec
from sweeps.trial import run_cell
from tests.sweeps.scaling_helpers import mlflow_store

ROOT = Path(__file__).parents[2]
CORPUS = Corpus(300, {"long": 1000, "short": 3000}, {"shards": "a" * 64})


@pytest.fixture(scope="session")
def tiny(tiny_corpus: Path) -> dict[str, Any]:
    """Two candidates x two seeds, a second or less each."""
    return {
        "name": "tiny-mix",
        "experiment": "tiny-mix",
        "mixes": {"even": {"long": 1, "short": 1}, "all_short": {"short": 1}},
        "width": 16,
        "tokens": 5120,
        "sequences": 2,
        "seeds": [0, 1],
        "data": {"dir": str(tiny_corpus), "sequence_length": 32, "validation_windows": 8},
        "model": {"n_layers": 1, "zero_init_head": True, "mup": {"base_width": 16, "base_d_head": 8}},
        "d_head": 8,
        "optim": {"lr": 8e-3, "eps": 1e-10, "schedule": {"kind": "cosine", "floor": 0.0}},
        "warmup": {"min_steps": 5},
        "min_steps": 10,
    }


def decays(tiny: dict[str, Any]) -> dict[str, Any]:
    """The same as decays of one stable phase a seed."""
    schedule = {"kind": "wsd", "decay_fraction": 0.25, "floor": 0.0}
    return {
        **tiny,
        "name": "tiny-anneal",
        "anneal": True,
        "seeds": [0],
        "data": {**tiny["data"], "weights": {"long": 1, "short": 1}},
        "optim": {**tiny["optim"], "schedule": schedule},
    }


# -- settings and candidates


def test_candidates_have_their_own_mix_and_the_same_rest(tiny: dict[str, Any]) -> None:
    sweep = parse_mix_sweep({**tiny, "mixes": {**tiny["mixes"], "ruled": {"unimax": {"max_epochs": 2}}}})
    found = build_mix_grid(sweep, CORPUS)
    assert [candidate.label for candidate in found[:3]] == ["even-s0", "all_short-s0", "ruled-s0"]
    assert len({candidate.cell.cell_id for candidate in found}) == 6
    assert {candidate.cell.tokens for candidate in found} == {candidate.drawn for candidate in found} == {5120}
    assert found[2].weights == pytest.approx({"long": 2000 / 5120, "short": 3120 / 5120})
    text, warnings = mix_table(found, CORPUS, max_epochs=2.1)
    assert "ruled" in text and "long 39.1% (2.00 epochs)" in text
    assert warnings == ["mix even reads long 2.6 times (1,000 unique tokens), max_epochs is 2.1"]
    alone = build_mix_grid(parse_mix_sweep({**tiny, "seeds": [0]}), CORPUS)
    assert alone[0].cell.cell_id == found[0].cell.cell_id  # a sweep that grows keeps what it has
    (first, *_) = build_mix_grid(parse_mix_sweep(decays(tiny)), CORPUS)
    assert first.drawn == 1280 and first.cell.cell_id != alone[0].cell.cell_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixes": {"one": {"long": 1}}}, "at least two candidates"),
        ({"mixes": {"a": {"long": 1}, "b": {}}}, "mixes.b must be weights"),
        ({"mixes": {"a": {"long": 1}, "b": {"long": 1}}}, "a and b are the same; drop one"),
        ({"mixes": {"a": {"long": 1}, "b": {"web": 1}}}, "mixes.b: unknown source 'web'; prepared"),
        ({"mixes": {"a": {"long": 1}, "b": {"long": -1}}}, "mixes.b: weights must be 0 or more"),
        ({"mixes": {"a": {"long": 1}, "b": {"long": 0}}}, "mixes.b: one weight must be above 0"),
        ({"mixes": {"a": {"long": 1}, "b": {"unimax": 1}}}, "mixes.b: weights: unimax with max_epochs 1 has 4,000"),
        ({"score": {"web": 1}}, "score: unknown source 'web'"),
        ({"score": {"long": 0}}, "score: weights must be 0 or more with one above 0"),
        ({"budgets": {1e9: [8]}}, "a mix sweep takes width and tokens"),
        ({"data": {"weights": {"long": 1}}}, "data.weights: each of mixes has its own"),
        ({"anneal": "yes"}, "anneal must be true or false"),
        ({"anneal": True}, "mode trunk needs optim.schedule.kind wsd"),
        ({"tokens": 128}, "2 steps of 2 sequences, min_steps is 10"),
        ({"mixs": 1}, "unknown setting mixs"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_clear_line(tiny: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_mix_grid(parse_mix_sweep({**tiny, **change}), CORPUS)


# -- the ranking


def simulated(shifts: dict[str, float], seeds: int, sd: float, rng: np.random.Generator) -> list[MixRun]:
    """Runs whose seeds share a large offset, which pairing takes away, and have a noise of their own."""
    offset = rng.normal(0, 0.3, seeds)
    return [
        MixRun(mix, seed, {"a": 2 + shift + offset[seed] + rng.normal(0, sd), "b": 3 + offset[seed]})
        for mix, shift in shifts.items()
        for seed in range(seeds)
    ]


def test_differences_are_the_paired_t_test_and_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    shifts = {"first": 0.0, "down": -0.05, "up": 0.05}
    runs = simulated(shifts, 4, 0.01, rng)
    found = {row.mix: row for row in rank(runs, list(shifts), ["a", "b"]).rows}
    value = {(run.mix, run.seed): run.bpb["a"] for run in runs}
    down, first = (np.array([value[mix, seed] for seed in range(4)]) for mix in ("down", "first"))
    expected = stats.ttest_rel(down, first)
    ends = expected.confidence_interval(0.95)
    by_a = found["down"].by_source["a"]
    assert (by_a.low, by_a.high) == pytest.approx((ends.low, ends.high))
    assert found["down"].difference.mean == pytest.approx(by_a.mean / 2)  # the mean of two sources
    covered = []
    for _ in range(400):
        rows = rank(simulated(shifts, 3, 0.01, rng), list(shifts), ["a", "b"], {"a": 1}).rows
        covered += [r.difference.low < shifts[r.mix] < r.difference.high for r in rows if r.difference]
    assert 0.92 < np.mean(covered) < 0.98


def test_the_order_the_words_and_one_seed() -> None:
    def row(mix: str, *values: float) -> list[MixRun]:
        return [MixRun(mix, seed, {"a": value, "b": 1.0}) for seed, value in enumerate(values)]

    runs = [*row("x", 2.0, 2.1, 2.2), *row("good", 1.9, 2.0, 2.1001), *row("bad", 2.2, 2.3, 2.4001)]
    runs += [*row("same", 2.1, 2.0, 2.2), *row("once", 1.0), MixRun("lost", 7, {"a": 1.5, "b": 1.0})]
    ranking = rank(runs, ["x", "good", "bad", "same", "once", "lost", "none"], ["a", "b"])
    assert [(r.mix, r.word) for r in ranking.rows] == [
        ("once", UNKNOWN), ("lost", MISSING), ("good", BETTER), ("x", FIRST), ("same", OPEN), ("bad", WORSE),
    ]  # fmt: skip
    assert ranking.unfinished == ("none",) and "none: no finished run" in ranking_text(ranking)
    one = rank([*row("x", 2.0), *row("good", 1.9)], ["x", "good"], ["a", "b"])
    assert noise_line(one).startswith("one seed: the noise of these differences is unknown")
    assert "noise unknown" in ranking_text(one) and "(" not in ranking_text(one).splitlines()[2]
    assert json.loads(json.dumps(ranking_dict(one, [])))["ranking"][0]["difference"]["low"] is None
    with pytest.raises(ConfigError, match="no run of the sweep has finished"):
        rank([], ["x"], ["a"])


def test_the_figure_shows_every_candidate(tmp_path: Path) -> None:
    runs = simulated({"first": 0.0, "down": -0.05, "up": 0.05}, 3, 0.01, np.random.default_rng(0))
    plot_ranking(rank(runs, ["first", "down", "up"], ["a", "b"]), tmp_path / "mix.png")
    assert (tmp_path / "mix.png").read_bytes()[:4] == b"\x89PNG"


# -- whole sweeps


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "sweeps.mix", "--config", str(folder / "sweep.yaml"), *arguments]
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=500)


def train(sweep: MixSweep, ledger: SweepLedger, parent: str, candidate: Candidate) -> dict[str, Any]:
    """Run one candidate in this thread, without Ray."""
    corpus = read_corpus(sweep.common.data.dir)
    spec = trial_spec(candidate.cell, sweep.common, ledger.uri, parent)
    sweep_kind(sweep, [candidate], corpus).extend(candidate.cell.cell_id, spec)  # type: ignore[misc]
    return run_cell(spec)


def begun(folder: Path, settings: dict[str, Any]) -> tuple[MixSweep, list[Candidate], SweepLedger, str]:
    """A sweep under a parent run, as a driver leaves it that is gone."""
    (folder / "sweep.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    sweep = load_mix_sweep(folder / "sweep.yaml")
    candidates = build_mix_grid(sweep, read_corpus(sweep.common.data.dir))
    name, ledger = sweep.common.name, SweepLedger(mlflow_store(), sweep.common.experiment)
    parent = ledger.create_sweep(name, grid_id([c.cell for c in candidates]), {"sweep": name}, "note")
    return sweep, candidates, ledger, parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_mlflow_has_is_ranked(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store())
    monkeypatch.chdir(tmp_path)
    sweep, candidates, ledger, parent = begun(tmp_path, {**tiny, "name": "ranked", "experiment": "ranked"})
    for count, candidate in enumerate(candidates):
        if count == 3:
            assert mix.main(["--config", "sweep.yaml"]) == 2 and "3 of 4 cells done" in capsys.readouterr().err
        assert train(sweep, ledger, parent, candidate)["status"] == "complete"
    assert mix.main(["--config", "sweep.yaml"]) == 0
    out = capsys.readouterr().out
    assert "all 4 cells are in MLflow already" in out and "differences to even, paired by seed" in out

    found = json.loads((tmp_path / "runs/ranked/mix.json").read_text())
    by_run = {(run["mix"], run["seed"]): run["bpb"] for run in found["runs"]}
    runs = {run.cell_id: run for run in ledger.cells(parent)}
    for candidate in candidates:  # what is ranked is what MLflow has of that very run
        run = runs[candidate.cell.cell_id]
        assert by_run[candidate.mix, candidate.cell.seed] == {n: run.metrics[f"bpb/{n}"] for n in ("long", "short")}
        assert run.params["mix"] == candidate.mix and json.loads(run.params["mix_weights"]) == candidate.weights
    (row,) = [row for row in found["ranking"] if row["mix"] == "all_short"]
    gaps = [np.mean(list(by_run["all_short", s].values())) - np.mean(list(by_run["even", s].values())) for s in (0, 1)]
    assert row["difference"]["mean"] == pytest.approx(np.mean(gaps)) and row["seeds"] == 2
    assert (tmp_path / "runs/ranked/mix.png").is_file()
    fits = ledger.client.search_runs([ledger.experiment_id], "tags.`scalewright.kind` = 'fit'")
    assert {run.data.params["mix"] for run in fits} == {"even", "all_short"}
    assert {run.data.tags["mlflow.parentRunId"] for run in fits} == {parent}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ray_sweep_goes_on(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store())
    sweep, candidates, ledger, parent = begun(tmp_path, tiny)
    first = train(sweep, ledger, parent, candidates[1])
    resumed = command(tmp_path, "--resume", "--cores", "1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "[4/4]" in resumed.stdout and "all_short-s1" in resumed.stdout
    runs = ledger.cells(parent)
    assert len(runs) == 4 and {run.cell_id for run in runs} == {candidate.cell.cell_id for candidate in candidates}
    assert first["run_id"] in {run.run_id for run in runs}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_decays_of_one_stable_phase_are_the_annealed_runs(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate's decay from the shared trunk ends where the same run trained as a whole does, to the last bit."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store())
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(decays(tiny), sort_keys=False))
    done = command(tmp_path, "--cores", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one seed: the noise of these differences is unknown" in done.stdout
    sweep, candidates, ledger, other = begun(tmp_path, {**decays(tiny), "name": "whole"})
    parent = ledger.sweeps("tiny-anneal")[0].run_id
    assert len(ledger.cells(parent, TRUNK)) == 1 and len(ledger.cells(parent)) == 2
    whole = train(sweep, ledger, other, candidates[1])["val_loss"]
    branch = next(run for run in ledger.cells(parent) if run.params["mix"] == "all_short")
    assert branch.metrics["val_loss"] == whole < math.log(300)


# -- command line


@pytest.mark.parametrize(("name", "runs"), [("mix", 12), ("mix_anneal", 6)])
def test_examples_plan(name: str, runs: int, tiny_corpus: Path, tmp_path: Path, capsys: Any) -> None:
    raw = yaml.safe_load((ROOT / "conf/sweep" / f"{name}.yaml").read_text())
    named = {"prose": "long", "reference": "short"}  # the demo's sources -> those of the tiny corpus
    raw["mixes"] = {
        mix_name: {named[source]: weight + i for source, weight in weights.items() if source in named} or {"long": 1}
        for i, (mix_name, weights) in enumerate(raw["mixes"].items())
    }
    if raw["anneal"]:
        raw["data"]["weights"] = {"long": 1, "short": 1}
    raw["data"]["dir"] = str(tiny_corpus)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(raw))
    assert mix.main(["--config", str(tmp_path / "sweep.yaml"), "--dry-run"]) == 0
    assert f"{runs} runs" in capsys.readouterr().out
