"""Optimum of a learning-rate curve: recovery, intervals that cover, refusals, and what the report says of a shift."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from sweeps.lr_report import fit_metrics, fit_params, log_lr_fit, lr_dict, lr_text, write_files
from sweeps.mlflow_runs import client
from sweeps.scaling.lr_curve import LrRun
from sweeps.scaling.lr_optimum import Optimum, fit_curves
from sweeps.scaling.lr_transfer import MOVES, OPEN, SHIFTS, STAYS, LrAnalysis, analyse_lr
from sweeps.scaling.table import FitError
from tests.sweeps.scaling_helpers import mlflow_store

RATES = tuple(1e-3 * 2.0**k for k in range(7))


def curve(
    best: float,
    width: int = 64,
    param: str = "mup",
    noise: float = 0.0,
    levels: tuple[float, ...] = (0.0,),
    rates: tuple[float, ...] = RATES,
    generator: np.random.Generator | None = None,
) -> list[LrRun]:
    """A parabola with its vertex at `best`, one seed a level."""
    draw = (lambda: 1.0) if generator is None else (lambda: float(np.exp(noise * generator.standard_normal())))
    return [
        LrRun(param, width, 512, lr, seed, (4 + 0.05 * math.log(lr / best) ** 2 + level) * draw())
        for lr in rates
        for seed, level in enumerate(levels)
    ]


def one(runs: list[LrRun], near: int = 4) -> Optimum:
    (optimum,), _ = fit_curves(runs, near, replicates=0)
    return optimum


# -- the vertex --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near", [3, 4, 5, 9])
def test_a_parabola_gives_its_vertex_back(near: int) -> None:
    optimum = one(curve(7.3e-3), near)
    assert optimum.ok and optimum.lr == pytest.approx(7.3e-3, rel=1e-9)
    assert optimum.loss == pytest.approx(4.0) and optimum.best_lr == pytest.approx(8e-3)
    assert len(optimum.used) == min(near, 7) and optimum.at(np.array([7.3e-3 * math.e]))[0] == pytest.approx(4.05)


def test_seeds_lift_the_curve_and_do_not_move_it() -> None:
    runs = curve(7.3e-3, levels=(0.0, 0.4, -0.2))
    assert one(runs).lr == pytest.approx(7.3e-3, rel=1e-9)
    unbalanced = [run for run in runs if not (run.seed == 1 and run.lr < 5e-3)]  # the high seed lacks low rates
    assert one(unbalanced).lr == pytest.approx(7.3e-3, rel=1e-9)


def test_the_parabola_goes_through_the_lower_side() -> None:
    assert one(curve(9.5e-3)).used == pytest.approx(RATES[2:6])  # 4e-3 to 3.2e-2, not 2e-3
    assert one(curve(7e-3)).used == pytest.approx(RATES[1:5])


def test_runs_without_an_end_are_no_points() -> None:
    runs = [dataclasses.replace(r, status="stopped", loss=1.0) if r.lr > 5e-2 else r for r in curve(7.3e-3)]
    runs = [dataclasses.replace(r, status="diverged", loss=math.nan) if r.lr > 3e-2 else r for r in runs]
    assert one(runs).lr == pytest.approx(7.3e-3, rel=1e-9)
    analysis = analyse_lr(runs, replicates=0)
    assert sorted(why for _, why in analysis.excluded) == ["run is diverged", "run is diverged"]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "reason", "edge"),
    [
        (curve(1.1e-3), r"at the lowest rate that has one, 0.001; add lower rates", "low"),
        (curve(6e-2), r"at the highest rate that has one, 0.064; add higher rates", "high"),
        (curve(7e-3, rates=RATES[2:4]), "2 rates have a loss, a parabola needs 3", ""),
        ([dataclasses.replace(r, loss=math.nan, status="failed") for r in curve(7e-3)], "0 rates have a loss", ""),
    ],
)
def test_refusals_say_why(runs: list[LrRun], reason: str, edge: str) -> None:
    import re

    optimum = one(runs)
    assert not optimum.ok and math.isnan(optimum.lr)
    assert re.search(reason, optimum.reason) and optimum.edge == edge


def test_a_rate_next_to_diverged_ones_is_an_edge() -> None:
    runs = [dataclasses.replace(r, status="diverged") if r.lr > 9e-3 else r for r in curve(9e-3)]
    optimum = one(runs)
    assert optimum.edge == "high" and "beyond it: diverged" in optimum.reason


def test_a_parabola_must_open_upwards_and_hold_its_vertex() -> None:
    # Lowest in the middle, and yet the wide parabola through all rates opens downwards.
    losses = [4.0, 5.0, 5.0, 4.9, 5.0, 5.0, 4.0]
    runs = [LrRun("mup", 64, 512, lr, 0, loss) for lr, loss in zip(RATES, losses, strict=True)]
    runs[0] = dataclasses.replace(runs[0], loss=4.95)
    runs[6] = dataclasses.replace(runs[6], loss=4.95)
    assert "downwards" in one(runs, near=7).reason
    # A straight slope that ends flat has its vertex beyond the last rate.
    flat = [LrRun("mup", 64, 512, lr, 0, v) for lr, v in zip(RATES[:5], [4.3, 4.2, 4.1, 4.0, 4.0001], strict=True)]
    assert one(flat, near=4).ok and "the vertex, 0.0278, is outside the rates" in one(flat, near=5).reason


def test_bad_settings_are_errors() -> None:
    with pytest.raises(FitError, match="no runs"):
        fit_curves([])
    with pytest.raises(FitError, match="near must be at least 3"):
        fit_curves(curve(7e-3), near=2)


# -- intervals ---------------------------------------------------------------------------------------------------------


def covered(seeds: int, near: int, sweeps: int, scale: float = 1.0) -> tuple[float, float]:
    """Shares of intervals (of LR*, of the slope) that hold the truth; `scale` misstates the noise."""
    generator = np.random.default_rng(near * 10 + seeds)
    hits, total, slopes = 0, 0, 0
    for sweep in range(sweeps):
        best = {width: 8e-3 * math.exp(generator.uniform(-0.35, 0.35)) for width in (64, 128, 256)}
        levels = tuple(generator.normal(0, 0.05, seeds))
        runs = [
            run
            for width, lr in best.items()
            for run in curve(lr, width, noise=0.003, levels=levels, generator=generator)
        ]
        given = None if scale == 1 else 0.003 * scale
        analysis = analyse_lr(runs, near, replicates=250, seed=sweep, noise_sd=given)
        total += 3
        hits += sum(o.low <= best[o.width] <= o.high for o in analysis.optima)
        x = np.log(list(best))
        truth = float(np.polyfit(x, np.log(list(best.values())), 1)[0])
        slopes += analysis.trends[0].low <= truth <= analysis.trends[0].high
    return hits / total, slopes / sweeps


@pytest.mark.parametrize(("seeds", "near"), [(1, 4), (3, 4)])
def test_intervals_cover(seeds: int, near: int) -> None:
    of_lr, of_slope = covered(seeds, near, sweeps=100)
    # 300 and 100 draws of .95: sd .013 and .022
    assert 0.91 <= of_lr <= 0.985 and of_slope >= 0.88


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "near"), [(1, 4), (1, 5), (3, 4), (3, 5)])
def test_intervals_cover_closely(seeds: int, near: int) -> None:
    of_lr, of_slope = covered(seeds, near, sweeps=500)
    assert 0.92 <= of_lr <= 0.98 and 0.92 <= of_slope <= 0.98


def test_too_small_a_noise_would_be_noticed() -> None:
    assert covered(1, 4, sweeps=40, scale=0.4)[0] < 0.8


def test_the_noise_comes_from_seeds_where_there_are_any() -> None:
    generator = np.random.default_rng(3)
    runs = [r for w in (64, 128) for r in curve(8e-3, w, noise=0.004, levels=(0.0, 0.3, 0.1), generator=generator)]
    _, noise = fit_curves(runs, replicates=0)
    assert noise is not None and noise.source == "repeated seeds" and noise.dof == 2 * 6 * 2
    assert noise.sd == pytest.approx(0.004, rel=0.35)
    _, noise = fit_curves([run for run in runs if run.seed == 0], replicates=0)
    assert noise is not None and noise.source == "residuals of the parabolas" and noise.dof == 2
    (optimum,), noise = fit_curves(curve(8e-3, rates=RATES[2:5]))
    assert noise is None and optimum.ok and math.isnan(optimum.low)  # three points, one seed: nothing shows the noise


# -- over widths -------------------------------------------------------------------------------------------------------


def sweep(exponents: dict[str, float], widths: tuple[int, ...] = (64, 128, 256), noise: float = 0.002) -> LrAnalysis:
    generator = np.random.default_rng(0)
    runs = [
        run
        for param, exponent in exponents.items()
        for width in widths
        for run in curve(
            1.4e-2 * (width / 64) ** exponent, width, param, noise, levels=(0.0, 0.1, 0.2), generator=generator
        )
    ]
    return analyse_lr(runs)


def test_a_best_rate_that_falls_is_told_from_one_that_stays() -> None:
    analysis = sweep({"mup": 0.0, "standard": -1.0})
    words = {trend.param: trend.word for trend in analysis.trends}
    assert words == {"mup": STAYS, "standard": MOVES}
    slopes = {trend.param: trend for trend in analysis.trends}
    assert slopes["standard"].low <= -1.0 <= slopes["standard"].high < -0.8
    text = lr_text(analysis)
    assert "muP: the best rate stays" in text and "standard: the best rate moves: largest over smallest" in text


def test_less_than_a_step_and_edges_are_said() -> None:
    (trend,) = sweep({"mup": -0.3}, noise=0.0005).trends
    assert trend.word == SHIFTS and trend.spread < 2
    (trend,) = sweep({"standard": -2.0}).trends  # 8.75e-4 at width 256 is below the rates
    assert trend.refused == (256,) and trend.edges == {256: "low"} and trend.word == MOVES
    analysis = sweep({"standard": 0.0}, widths=(64,))
    assert analysis.trends[0].word == OPEN and "not decided, 1 width" in lr_text(analysis)


# -- what people see ---------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    analysis = sweep({"mup": 0.0, "standard": -2.0})
    figure, numbers = write_files(analysis, tmp_path)
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 20_000
    read = json.loads(numbers.read_text())
    assert [o["width"] for o in read["optima"]] == [64, 128, 256] * 2
    assert read["optima"][-1]["lr"] is None and "lowest rate" in read["optima"][-1]["reason"]
    assert read == lr_dict(analysis)


def test_fits_are_runs_that_mlflow_can_compare(tmp_path: Path) -> None:
    analysis = sweep({"mup": 0.0, "standard": -2.0})
    store = client(mlflow_store())
    parent = store.create_run(store.create_experiment("lr-fits"), run_name="sweep").info.run_id
    ids = log_lr_fit(analysis, "lr-fits", parent, mlflow_store())
    assert sorted(ids) == ["fit-lr-mup-512", "fit-lr-standard-512"]
    run = store.get_run(ids["fit-lr-standard-512"])
    assert run.data.tags["scalewright.kind"] == "fit" and run.data.tags["mlflow.parentRunId"] == parent
    trend = analysis.trends[1]
    assert run.data.metrics == fit_metrics(analysis, trend) and "lr_opt_256" not in run.data.metrics
    assert run.data.metrics["slope"] == trend.slope and run.data.params["verdict"] == "moves"
    assert run.data.params == {key: str(value) for key, value in fit_params(analysis, trend).items()}
    assert "width 256: the lowest loss" in run.data.params["flags"]
    assert {item.path for item in store.list_artifacts(ids["fit-lr-mup-512"])} >= {"mup_lr.png", "mup_lr.json"}
