"""Run tables for tests: made from known surfaces, or read from published measurements."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sweeps.records import read_runs
from sweeps.scaling.table import Run, RunTable
from tests.stores import new_store

HOFFMANN = (1.69, 406.4, 410.7, 0.34, 0.28)
Surface = Callable[[float, float], float]


def surface(e: float, a: float, b: float, alpha: float, beta: float) -> Surface:
    return lambda n, d: e + a / n**alpha + b / d**beta


def grid(
    law: Surface,
    budgets: tuple[float, ...] = (1e18, 3e18, 1e19, 3e19, 1e20),
    sizes: int = 9,
    spread: float = 4.0,
    noise: float = 0.0,
    seed: int = 0,
    centre: Callable[[float], float] | None = None,
) -> RunTable:
    """IsoFLOP grid with C = 6 N D, sizes spread in ln N around the optimum of Hoffmann's surface (or `centre`)."""
    generator = np.random.default_rng(seed)
    optimum = centre or (lambda c: hoffmann_optimum(c))
    runs = []
    for c in budgets:
        for n in np.geomspace(optimum(c) / spread, optimum(c) * spread, sizes):
            d = c / (6 * n)
            loss = law(n, d) * float(np.exp(noise * generator.standard_normal()))
            runs.append(Run(f"{c:g}-{n:.4g}", float(n), d, c, loss, c))
    return RunTable.from_runs(runs, convention="6ND")


def hoffmann_optimum(c_flops: float) -> float:
    _, a, b, alpha, beta = HOFFMANN
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    return g * (c_flops / 6) ** (beta / (alpha + beta))


def published(name: str) -> Path:
    """A file of published measurements; skips the test where the folder is not there."""
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "scaling_data"
    folder = Path(os.environ.get("SCALING_DATA_DIR", beside))
    if not (folder / name).is_file():
        pytest.skip(f"published data {name} is not in {folder}; set SCALING_DATA_DIR")
    return folder / name


def llama_3() -> RunTable:
    return read_runs(str(published("isoflops_openathena.csv")), where='experiment == "llama_3__raw_loss"')


def chinchilla(where: str | None = "excluded_by_epoch != 1") -> RunTable:
    return read_runs(str(published("chinchilla_epoch.csv")), where=where)


@functools.cache
def mlflow_store() -> str:
    """Address of one real SQLite store for all tests of the process."""
    folder = tempfile.TemporaryDirectory(prefix="scalewright-mlflow-")
    _KEEP.append(folder)  # removed when the process ends
    return new_store(folder.name)


_KEEP: list[tempfile.TemporaryDirectory[str]] = []
