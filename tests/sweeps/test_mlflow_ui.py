"""The real MLflow UI in a headless browser: the experiment opens in its classic view, and two fits compare."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps.fit import fit_experiment
from sweeps.fit_report import FitReport
from sweeps.mlflow_fits import fit_metrics, runs_link, where_to_look
from sweeps.mlflow_runs import client
from tests.plugins.mlflow_server import MLflowServer
from tests.sweeps.scaling_helpers import HOFFMANN, grid, surface

pytestmark = pytest.mark.slow  # a server, a browser and their pages: half a minute of CPU

# Wide enough for all metric columns: the UI builds only those in sight.
WINDOW = {"width": 2600, "height": 2400}
PATIENCE_MS = 60_000
WIDE_IMAGES = "[...document.images].filter(i => i.src.startsWith('blob:') && i.naturalWidth > 900).length"


@pytest.fixture(scope="module")
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium in PATH (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MLflowServer]:
    folder = tmp_path_factory.mktemp("ui")
    server = MLflowServer(f"sqlite:///{folder}/mlflow.db", folder)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def report(server: MLflowServer) -> FitReport:
    table = grid(surface(*HOFFMANN), noise=0.003, sizes=6)
    return fit_experiment(
        table, budgets=[1e21], bootstrap=60, mlflow_experiment="fits", tracking_uri=server.uri
    )  # fmt: skip


@pytest.fixture
def page(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=WINDOW)
        page.set_default_timeout(PATIENCE_MS)
        yield page
        browser.close()


def follow(page: Any, server: MLflowServer, link: str) -> None:
    """Opens the experiment's runs, then a link of the description above them."""
    experiment = client(server.uri).get_experiment_by_name("fits").experiment_id
    page.goto(f"{server.uri}/{runs_link(experiment)}")
    address = page.get_by_role("link", name=link).get_attribute("href")
    page.goto(f"{server.uri}/{address[address.index('#') :]}")


def test_the_comparison_shows_exponents_and_figures(server: MLflowServer, report: FitReport, page: Any) -> None:
    follow(page, server, "Compare the fits")
    page.get_by_text("a_lo", exact=True).first.wait_for()
    text = page.inner_text("body")
    for name in ("isoflop", "parametric"):
        assert f"fit-{name}" in text
        metrics = fit_metrics(report.analysis.results[name])
        for key in ("a", "a_lo", "a_hi"):
            assert f"{round(metrics[key], 3):g}" in text, (name, key)
    for file in ("fit.png", "isoflop.png"):
        page.get_by_text(file, exact=True).first.dispatch_event("click")
        page.wait_for_function(f"{WIDE_IMAGES} >= 2")


def test_fits_are_a_table_with_metric_columns(server: MLflowServer, report: FitReport, page: Any) -> None:
    page.goto(where_to_look("fits", server.uri))  # what the command prints
    page.get_by_text("n_opt", exact=True).first.wait_for()
    page.get_by_text("fit-isoflop", exact=True).first.wait_for()
    follow(page, server, "all fits as a table")
    page.get_by_text("n_opt", exact=True).first.wait_for()
    assert f"{len(report.mlflow_run_ids)} matching runs" in page.inner_text("body")


def test_the_logged_model_loads_through_the_server(server: MLflowServer, report: FitReport, tmp_path: Path) -> None:
    import mlflow
    import pandas as pd

    run_id = report.mlflow_run_ids["parametric"]
    client(server.uri).download_artifacts(run_id, "model", str(tmp_path))
    model = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    loss = model.predict(pd.DataFrame({"N": [1e9], "D": [2e10]}))["loss"][0]
    assert loss == pytest.approx(report.analysis.results["parametric"].model.loss_at(1e9, 2e10, 1.2e20), rel=1e-12)
