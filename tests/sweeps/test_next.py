"""The next cells: the criterion against algebra and brute force, real shapes, and a seeded comparison with a grid."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from lm.data.synthetic import random_documents, write_folder
from sweeps import next as next_cells
from sweeps.config import load_config
from sweeps.grid import build_grid
from sweeps.isoflop import read_corpus
from sweeps.next_config import Family, extended_config
from sweeps.scaling.design import Cells, Criterion, choose, decision_gradient, log_loss_jacobian
from sweeps.scaling.isoflop import fit_isoflop
from sweeps.scaling.next_simulation import compare, simulate
from sweeps.scaling.optimum import FlopRule, optimum
from sweeps.scaling.proposal import Base, base_of, next_budget, propose
from sweeps.scaling.row_design import propose_rows
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, surface

THETA = np.array([[np.log(406.4), np.log(410.7), np.log(1.69), 0.34, 0.28], [6.1, 6.2, 0.4, 0.36, 0.30]])


def some_cells(count: int, seed: int) -> Cells:
    generator = np.random.default_rng(seed)
    c = np.exp(generator.uniform(np.log(1e18), np.log(1e20), count))
    n = np.exp(generator.uniform(np.log(1e7), np.log(1e9), count))
    return Cells(n, c / (6 * n), c)


@pytest.fixture(scope="module")
def base() -> Base:
    return base_of(grid(surface(*HOFFMANN), noise=0.003, sizes=5, spread=3.0), 100)


def test_gradients_are_those_of_the_surface() -> None:
    """Against finite differences of ln L; for ln N* against the closed form d ln N* / d ln A = 1 / (alpha + beta)."""
    cells = some_cells(4, 0)
    jacobian = log_loss_jacobian(THETA, cells.n, cells.d)
    log_a, _, _, alpha, beta = THETA[0]

    def log_loss(theta: np.ndarray) -> np.ndarray:
        a, b, e, p, q = theta
        return np.log(np.exp(e) + np.exp(a) * cells.n**-p + np.exp(b) * cells.d**-q)

    for i in range(5):
        step = np.zeros(5)
        step[i] = 1e-6
        numeric = (log_loss(THETA[0] + step) - log_loss(THETA[0] - step)) / 2e-6
        np.testing.assert_allclose(jacobian[0, :, i], numeric, rtol=1e-5)
    gradient = decision_gradient(THETA, FlopRule(), 1e21)[0]
    assert gradient[0] == pytest.approx(1 / (alpha + beta), rel=1e-5)
    assert gradient[1] == pytest.approx(-1 / (alpha + beta), rel=1e-5)
    assert gradient[2] == pytest.approx(0, abs=1e-9)
    loss = decision_gradient(THETA, FlopRule(), 1e21, "loss")[0]
    n, _, least = (float(v[0]) for v in optimum(THETA[:1], FlopRule(), 1e21))
    assert loss[0] == pytest.approx(np.exp(log_a) * n**-alpha / least, rel=1e-4)  # envelope theorem: N* may stay
    with pytest.raises(ValueError, match="unknown decision"):
        decision_gradient(THETA, FlopRule(), 1e21, "width")


def test_predicted_variance_is_that_of_repeated_least_squares() -> None:
    """Linear theory against 400 noisy refits by Gauss-Newton from the truth."""
    runs, nothing = some_cells(60, 1), some_cells(1, 2)
    sd, theta = 0.001, THETA[:1]
    criterion = Criterion(theta, FlopRule(), 1e21, runs, nothing, sd)
    jacobian = log_loss_jacobian(theta, runs.n, runs.d)[0]
    noise = sd * np.random.default_rng(3).standard_normal((400, len(runs)))
    moved = theta + noise @ np.linalg.pinv(jacobian).T
    spread = float(np.std(moved @ criterion.gradient[0]))
    assert np.exp(criterion.value([]) / 2) == pytest.approx(spread, rel=0.1)


def test_the_chosen_set_is_the_best_there_is() -> None:
    """Every set of 10 candidates within the FLOPs, by brute force, for 6 problems."""
    worse = []
    for seed in range(6):
        runs, pool = some_cells(12, seed), some_cells(10, 100 + seed)
        criterion = Criterion(THETA, FlopRule(), 1e21, runs, pool, 0.003)
        flops = float(np.sort(pool.c)[:6].sum())
        sets = [s for k in range(1, 11) for s in itertools.combinations(range(10), k) if pool.c[list(s)].sum() <= flops]
        best = min(criterion.value(s) for s in sets)
        found = choose(criterion, flops)
        assert pool.c[list(found.rows)].sum() == pytest.approx(found.flops) and found.flops <= flops * (1 + 1e-9)
        assert found.ratio == pytest.approx(np.exp((criterion.value(found.rows) - criterion.value([])) / 2))
        worse.append(np.exp((criterion.value(found.rows) - best) / 2) - 1)
        np.testing.assert_allclose(
            criterion.with_each([0, 3]), [criterion.value([0, 3, j]) for j in range(10)], rtol=1e-8
        )
        kept = choose(criterion, float(pool.c.sum()), most=3, keep=[7])
        assert 7 in kept.rows and len(kept.rows) == 3
    assert np.median(worse) < 1e-9 and max(worse) < 0.03  # exchanges are a heuristic: 3% of the width at most here
    with pytest.raises(FitError, match="no candidate fits"):
        choose(criterion, 1.0)


def test_a_proposal_keeps_a_cell_beyond_the_grid(base: Base) -> None:
    proposal = propose(base, 1e22)
    largest = next_budget(base.table.budgets, 1e22)
    assert largest == 3.2e20
    assert proposal.holdout is not None
    assert proposal.cells.c[proposal.holdout] == largest
    assert proposal.cells.n[proposal.holdout] == pytest.approx(base.n_opt(largest), rel=0.05)
    assert proposal.after < proposal.before and len(proposal.cells) <= 18
    assert np.allclose(proposal.cells.c, 6 * proposal.cells.n * proposal.cells.d, rtol=1e-6)
    distance = np.abs(np.log([n / base.n_opt(c) for n, c in zip(proposal.cells.n, proposal.cells.c, strict=True)]))
    assert distance.max() < np.log(4.0)
    cheap = propose(base, 1e22, flops=1e20, most=4)
    assert cheap.holdout is None and "nothing tests" in cheap.notes[0] and len(cheap.cells) <= 4
    with pytest.raises(ValueError, match="must lie above the sweep's 1e"):
        propose(base, 1e22, largest=1e19)


def test_following_it_beats_a_uniform_grid_at_equal_flops() -> None:
    """Seeded and small; the figures in docs/forecasts.md are from more sweeps and more surfaces."""
    arms = simulate("chinchilla", 8, seed=1, arms=("start", "uniform", "next"))
    assert (arms["next"].flops <= arms["uniform"].flops * (1 + 1e-9)).all()
    assert (arms["next"].cells <= arms["uniform"].cells).all()
    over = compare(arms["next"], arms["uniform"])
    assert over.width_high < 1 and over.sweeps == 8
    assert np.nanmedian(arms["next"].expected) == pytest.approx(
        np.nanmedian(arms["next"].width / arms["start"].width), rel=0.25
    )
    with pytest.raises(ValueError, match="unknown surface"):
        simulate("flat", 2)


def test_rows_for_approach_2_give_what_they_promise() -> None:
    """The expected sd of ln N* against 200 sweeps with those rows, simulated and fitted anew."""
    law = surface(*HOFFMANN)
    table, target, sd = grid(law, noise=0.003, sizes=5, spread=3.0), 1e22, 0.003
    plan = propose_rows(table, target)
    assert plan.after < plan.before
    cheap = propose_rows(table, target, flops=5e19)
    assert cheap.repeats and cheap.flops <= 5e19 and plan.after < cheap.after < cheap.before
    generator, found = np.random.default_rng(0), []
    n, d, c = (np.concatenate([getattr(table, k), getattr(plan.cells, k)]) for k in ("n", "d", "c"))
    for _ in range(200):
        loss = law(n, d) * np.exp(sd * generator.standard_normal(len(n)))
        rows = [Run(str(i), *map(float, row), float(row[2])) for i, row in enumerate(zip(n, d, c, loss, strict=True))]
        found.append(np.log(fit_isoflop(RunTable.from_runs(rows), loss_form="power").n_opt(target)))
    assert float(np.std(found)) == pytest.approx(plan.after, rel=0.35)  # the noise is estimated, not known
    with pytest.raises(FitError, match="no row of cells fits"):
        propose_rows(table, target, flops=1e10)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose runs are of a known surface."""
    place = tmp_path_factory.mktemp("next")
    documents = {"train": random_documents(30_000, 300, 60, 0), "validation": random_documents(2_000, 300, 60, 1)}
    write_folder(place / "data", {"prose": documents}, vocab_size=300)
    config = {
        "name": "known",
        "budgets": {1e9: [16, 24, 32, 48, 64], 3e9: [16, 32, 48, 64, 96], 9e9: [32, 48, 64, 96, 128]},
        "data": {"dir": str(place / "data"), "sequence_length": 32},
        "model": {"n_layers": 1, "mup": {"base_width": 16, "base_d_head": 8}},
        "d_head": 8,
        "tolerance": 0.02,
        "min_steps": 15,
    }
    (place / "sweep.yaml").write_text(yaml.safe_dump(config))
    law, generator = surface(1.0, 60.0, 60.0, 0.34, 0.34), np.random.default_rng(0)
    loaded = load_config(place / "sweep.yaml")
    lines = ["run,N_params,D_tokens,C_flops,loss,C_budget"]
    for cell in build_grid(loaded, read_corpus(loaded.data.dir)):
        loss = law(cell.n_params, cell.tokens) * np.exp(0.002 * generator.standard_normal())
        lines.append(f"{cell.cell_id},{cell.n_params},{cell.tokens},{cell.flops},{loss},{cell.budget_flops}")
    (place / "runs.csv").write_text("\n".join(lines) + "\n")
    return place


def test_cells_of_a_config_are_real_runs_and_its_file_holds_them(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, numbers = sweep / "more.yaml", sweep / "next.json"
    arguments = ["--runs", str(sweep / "runs.csv"), "--budget", "1e11", "--bootstrap", "60"]
    arguments += ["--config", str(sweep / "sweep.yaml"), "--out", str(out), "--json", str(numbers), "--cells", "6"]
    assert next_cells.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("holdout: forecast it") == 1 and f"--config {out} --resume" in text
    proposed = json.loads(numbers.read_text())["cells"]
    old, new = load_config(sweep / "sweep.yaml"), load_config(out)
    corpus = read_corpus(old.data.dir)
    before = {cell.cell_id for cell in build_grid(old, corpus)}
    after = {cell.cell_id: cell for cell in build_grid(new, corpus)}
    assert before < set(after)  # the finished cells keep their identity: --resume runs only the others
    added = sorted((c.budget_flops, c.model.d_model, c.flops) for i, c in after.items() if i not in before)
    assert added == sorted((c["budget_flops"], c["d_model"], c["c_flops"]) for c in proposed)
    assert 1 <= len(added) <= 6 and max(added)[0] == 2.7e10


def test_widths_that_are_there_or_break_the_rules_are_not_proposed(sweep: Path) -> None:
    config = load_config(sweep / "sweep.yaml")
    family = Family(config, read_corpus(config.data.dir))
    cells = family.cells(family.sizes(1e9, 20_000, np.log(2.0)))
    assert cells and not {cell.model.d_model for cell in cells} & {16, 24, 32, 48, 64}
    assert all(abs(cell.deviation) <= config.tolerance and cell.steps >= config.min_steps for cell in cells)
    assert len(family.sizes(1e6, 20_000, np.log(2.0))) == 0  # too short for any
    again = yaml.safe_load(extended_config(sweep / "sweep.yaml", family, []))
    assert again["budgets"] == yaml.safe_load((sweep / "sweep.yaml").read_text())["budgets"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "-1"], "--budget is -1"),
        (["--budget", "1e11", "--flops", "10"], "no candidate fits into 10 FLOPs"),
        (["--budget", "1e11", "--out", "x.yaml"], "name it with --config"),
        (["--budget", "1e11", "--cells", "0"], "--cells must be 1 or more"),
        (["--budget", "1e11", "--bootstrap", "3"], "too few"),
        (["--budget", "1e11", "--where", "N_params < 0"], "holds for none of the 15 rows"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert next_cells.main(["--runs", str(sweep / "runs.csv"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_the_simulation_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "simulation.json"
    assert next_cells.main(["--simulate", "--sweeps", "2", "--surface", "symmetric", "--json", str(out)]) == 0
    assert "next over uniform" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["symmetric"]["next"]["width"]) == 2
    assert next_cells.main(["--simulate", "--sweeps", "1"]) == 2
