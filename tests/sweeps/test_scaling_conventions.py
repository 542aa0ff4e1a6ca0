"""The exponent under each way of counting: Porian's runs, a sweep's own columns, curves at common budgets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lm.config import ModelConfig
from lm.plan import flops_per_token, n_params
from sweeps.records import read_runs
from sweeps.scaling.analysis import analyse
from sweeps.scaling.approaches import FitOptions
from sweeps.scaling.conventions import at_common_budgets, conventions, exponents
from sweeps.scaling.table import FitError, Run, RunTable
from tests.sweeps.scaling_helpers import HOFFMANN, grid, published, surface

PORIAN_VOCABULARY = 50432


def porian(where: str) -> RunTable:
    """Runs counted with the head, and the N of their blocks: N less vocabulary times an integer width."""
    path = str(published("porian_isoflop.csv"))
    blocks = sorted({run.n_params for run in read_runs(path, where="count == 'kaplan'").runs})

    def without_head(n: float) -> float | None:
        return next((b for b in blocks if n > b and ((n - b) / PORIAN_VOCABULARY).is_integer()), None)

    table = read_runs(path, where=f"file == 'summary_df' and count == 'standard' and {where}")
    runs = [replace(run, n_non_embedding=without_head(run.n_params)) for run in table.runs]
    assert all(run.n_non_embedding for run in runs)
    return RunTable.from_runs(runs, convention="6N", n_convention="total")


def test_leaving_the_head_out_moves_porians_exponent() -> None:
    """Published for these runs: .706 counted with the head, .835 in Kaplan's way."""
    table = porian("hparams == 'base' and warmup == 'long' and decay == 'kaplan'")
    found = exponents(table, ("isoflop", "parametric"), bootstrap=50, options=FitOptions(max_excess=0.05))
    by_name = {(e.flops, e.approach): e for e in found}
    assert by_name["6N", "isoflop"].a == pytest.approx(0.706, abs=0.02)
    assert by_name["kaplan", "isoflop"].a == pytest.approx(0.835, abs=0.05)
    surfaces = by_name["6N", "parametric"].a, by_name["kaplan", "parametric"].a
    assert surfaces == pytest.approx((0.706, 0.835), abs=0.03)
    assert surfaces == pytest.approx((0.691, 0.843), abs=1e-3)
    assert by_name["kaplan", "parametric"].low > by_name["6N", "parametric"].high


def test_the_count_moves_the_exponent_of_tuned_runs() -> None:
    table = porian("hparams == 'tuned' and warmup == 'short' and decay == 'const'")
    options = FitOptions(max_excess=0.05)
    found = {(e.flops, e.approach): e.a for e in exponents(table, ("isoflop", "parametric"), 0, options)}
    assert (found["6N", "isoflop"], found["kaplan", "isoflop"]) == pytest.approx((0.50, 0.62), abs=0.01)
    assert (found["6N", "parametric"], found["kaplan", "parametric"]) == pytest.approx((0.55, 0.84), abs=0.01)


def own_sweep() -> RunTable:
    """Real small shapes counted by lm.plan, losses of a surface in the total N whose exponent is .5."""
    runs = []
    for width in (16, 24, 32, 48, 64, 96):
        config = ModelConfig(vocab_size=1024, d_model=width, n_layers=3, n_heads=width // 8)
        extra: dict[str, object] = {
            "vocab_size": 1024.0, "d_model": float(width), "n_layers": 3.0, "n_heads": float(width // 8),
            "sequence_length": 128.0, "tie_embeddings": False,
        }  # fmt: skip
        for tokens in np.geomspace(2e5, 2e7, 6):
            loss = 1.0 + 20 / n_params(config, "total") ** 0.28 + 20 / tokens**0.28
            flops = tokens * flops_per_token(config, 128)
            runs.append(Run(f"{width}-{tokens:.3g}", float(n_params(config)), tokens, flops, loss, extra=extra))
    return RunTable.from_runs(runs, convention="matmul+causal_attention", n_convention="matmul")


def test_shapes_give_every_convention() -> None:
    table = own_sweep()
    tables = conventions(table)
    assert list(tables) == [
        "matmul+causal_attention / matmul", "6N / total", "palm / total", "kaplan / non_embedding", "6ND / matmul",
    ]  # fmt: skip
    config = ModelConfig(vocab_size=1024, d_model=16, n_layers=3, n_heads=2)
    first = tables["palm / total"].runs[0]
    assert first.n_params == n_params(config, "total")
    assert first.c_flops == pytest.approx(first.d_tokens * flops_per_token(config, 128, "palm"))
    found = {e.flops: e.a for e in exponents(table, ("parametric",), bootstrap=0)}
    assert found["6N"] == pytest.approx(0.5, abs=1e-3)
    # Without embeddings a small model looks smaller than it is: N* seems to grow faster.
    assert found["kaplan"] > found["matmul+causal_attention"] + 0.05 > found["6N"] + 0.05


def test_a_table_without_such_columns_has_its_own_convention_only() -> None:
    assert list(conventions(grid(surface(*HOFFMANN)))) == ["6ND / as given"]


def test_curves_are_brought_to_common_budgets() -> None:
    law = surface(*HOFFMANN)
    runs = [
        Run(f"{n:.3g}-{c:.3g}", float(n), c / (6 * n), c, law(n, c / (6 * n)))
        for n in np.geomspace(1e8, 2e9, 9)
        for c in np.geomspace(1e19, 1e21, 7) * (n / 4e8) ** 0.2
    ]
    table = at_common_budgets(RunTable.from_runs(runs))
    assert len(table.budgets) == 7
    exact = np.array([law(run.n_params, run.d_tokens) for run in table.runs])
    assert table.loss == pytest.approx(exact, rel=1e-3)
    assert table.c == pytest.approx(6 * table.n * table.d, rel=1e-3)
    with pytest.raises(FitError, match="4 sizes have the 4 runs that interpolation takes"):
        at_common_budgets(table.where(table.n < 3.5e8))


def test_a_surface_that_is_refused_says_so_under_every_convention() -> None:
    """Losses without a floor: the constants are no answer under the table's own counting, nor under another."""
    table = grid(surface(0.0, 15.0, 17.0, 0.21, 0.14))
    assert "E at its bound" in analyse(table, ["parametric"], bootstrap=0).refused["parametric"]
    assert all("E at its bound" in e.limit for e in exponents(table, ("parametric",), bootstrap=0))
    assert not any(e.limit for e in exponents(grid(surface(*HOFFMANN)), ("parametric",), bootstrap=0))
