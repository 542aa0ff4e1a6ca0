"""Forecasts on a real MLflow store: made before the run, held against it once, whatever is killed in between."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.errors import ConfigError
from sweeps import forecast_record, ledger, ledger_rows, mlflow_runs
from sweeps.forecast_record import log_forecast, log_outcome
from sweeps.forecasting import Forecast
from sweeps.ledger_rows import Row, interval_score, read_ledger, settle
from sweeps.ledger_score import binomial_interval, score
from tests.sweeps.scaling_helpers import mlflow_store


@pytest.fixture
def store() -> str:
    return mlflow_store()


def planned(identity: str, loss: float = 3.0, half: float = 0.1) -> Forecast:
    return Forecast(
        identity, "isoflop", 1e12, 1e5, 1e6, None, 1e5, 1e6, 1e12, loss, loss - half, loss + half, 0.01, "6N", "matmul"
    )


def train(
    store: str, experiment: str, identity: str, val_loss: float | None, status: str | None = "FINISHED", **tags: str
) -> str:
    """A training run as recipes.pretrain leaves it; no status leaves it running."""
    client = mlflow_runs.client(store)
    run_id = client.create_run(
        client.get_experiment_by_name(experiment).experiment_id,
        tags={"scalewright.kind": "run", "scalewright.forecast_id": identity, **tags},
    ).info.run_id
    if val_loss is not None:
        client.log_metric(run_id, "val_loss", val_loss, step=10)
    if status:
        client.set_terminated(run_id, status)
    return str(run_id)


def only(rows: list[Row]) -> Row:
    assert len(rows) == 1
    return rows[0]


@pytest.mark.parametrize(
    ("val_loss", "status", "tags", "expected"),
    [
        (3.05, "FINISHED", {}, "inside"),
        (3.2, "FINISHED", {}, "outside"),
        (math.nan, "FINISHED", {}, "diverged"),
        (9.0, "FINISHED", {"scalewright.status": "diverged"}, "diverged"),
        (3.05, None, {}, "running"),
        (3.05, "KILLED", {}, "stopped"),
        (None, "FINISHED", {}, "stopped"),
    ],
)
def test_a_forecast_is_held_against_its_run(
    store: str, request: pytest.FixtureRequest, val_loss: float, status: str, tags: dict[str, str], expected: str
) -> None:
    name = request.node.name
    made = log_forecast(planned(name), name, tracking_uri=store)
    assert only(read_ledger(name, store)).status == "open"
    run_id = train(store, name, name, val_loss, status, **tags)
    row = only(read_ledger(name, store))
    assert (row.status, row.training_run_id) == (expected, run_id)
    decided = expected in ("inside", "outside", "diverged")
    assert settle([row], store) == decided
    assert settle(read_ledger(name, store), store) == 0  # once
    logged = mlflow_runs.client(store).get_run(made.mlflow_run_id).data
    assert logged.tags["scalewright.training_run_id"] == run_id
    assert logged.metrics.get("inside") == ({"inside": 1.0}.get(expected, 0.0) if decided else None)
    if expected == "outside":
        assert logged.metrics["error"] == pytest.approx(3.2 / 3 - 1)
        assert logged.metrics["interval_score"] == pytest.approx(0.2 + 40 * 0.1)
    assert only(read_ledger(name, store)).status == expected


def test_a_run_that_has_a_loss_gets_no_forecast_but_a_late_one(store: str) -> None:
    mlflow_runs.client(store).create_experiment("begun")
    fresh, begun = train(store, "begun", "", None, None), train(store, "begun", "", 3.0, None)
    linked = log_forecast(planned("fresh"), "begun", tracking_uri=store, training_run_id=fresh)
    client = mlflow_runs.client(store)
    assert client.get_run(fresh).data.tags["scalewright.forecast_id"] == "fresh"
    assert client.get_run(linked.mlflow_run_id).data.tags["scalewright.training_run_id"] == fresh
    with pytest.raises(ConfigError, match="has logged a loss already"):
        log_forecast(planned("after"), "begun", tracking_uri=store, training_run_id=begun)
    assert [row.forecast_id for row in read_ledger("begun", store)] == ["fresh"]
    late = log_forecast(planned("after"), "begun", tracking_uri=store, training_run_id=begun, late=True)
    client.set_terminated(begun)
    settle(read_ledger("begun", store), store)
    rows = {row.forecast_id: row for row in read_ledger("begun", store)}
    assert rows["after"].status == "late" and rows["after"].measured == 3.0 and not rows["after"].scored
    assert "inside" not in client.get_run(late.mlflow_run_id).data.metrics
    log_outcome(late, 3.0, begun, store)  # nor by the other way
    assert "inside" not in client.get_run(late.mlflow_run_id).data.metrics
    assert score(list(rows.values())).late == 1 and score(list(rows.values())).scored == 0


def test_a_loss_older_than_the_forecast_is_found_out(store: str) -> None:
    """Nobody asked log_forecast about the run, it was tagged afterwards: the times tell."""
    made = log_forecast(planned("sly"), "sly", tracking_uri=store)
    client = mlflow_runs.client(store)
    run_id = train(store, "sly", "sly", None, None)
    before = client.get_run(made.mlflow_run_id).info.start_time - 60_000
    client.log_metric(run_id, "val_loss", 3.0, timestamp=before, step=10)
    client.set_terminated(run_id)
    row = only(read_ledger("sly", store))
    assert row.status == "late" and "before the forecast" in row.note


def test_the_first_finished_run_counts_and_the_first_forecast_stands(store: str) -> None:
    made = log_forecast(planned("twice"), "twice", tracking_uri=store)
    train(store, "twice", "twice", 2.0, "FAILED")  # crashed: may go on, decides nothing
    first = train(store, "twice", "twice", 3.5)
    train(store, "twice", "twice", 3.0)  # a repeat that hits is not taken instead
    again = log_forecast(planned("twice", loss=3.5), "twice", tracking_uri=store)
    assert (again.mlflow_run_id, again.loss, again.loss_hi) == (made.mlflow_run_id, 3.0, 3.1)
    row = only(read_ledger("twice", store))
    assert (row.status, row.training_run_id, row.note) == ("outside", first, "1 later runs of it are not counted")


class Killed(BaseException):
    pass


class Dying:
    """A client that stops the process, as it were, at its n-th write."""

    writes = ("create_run", "log_batch", "set_terminated", "set_tag", "log_artifact")

    def __init__(self, client: Any, allowed: int) -> None:
        self.client, self.left = client, allowed

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if name not in self.writes:
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return method(*args, **kwargs)

        return call


def killed_at(monkeypatch: pytest.MonkeyPatch, store: str, allowed: int, action: Callable[[], Any]) -> bool:
    """Runs `action` with so many writes; whether it was cut off."""
    dying = Dying(mlflow_runs.client(store), allowed)
    with monkeypatch.context() as patch:
        for module in (mlflow_runs, forecast_record, ledger_rows):
            patch.setattr(module, "client", lambda uri=None: dying)
        try:
            action()
        except Killed:
            return True
        return False


def test_killed_at_any_write_nothing_is_doubled_or_lost(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow_runs.client(store).create_experiment("kills")
    cut = 0
    for allowed in range(20):
        name = f"k{allowed}"
        if not killed_at(monkeypatch, store, allowed, lambda n=name: log_forecast(planned(n), "kills", None, store)):  # type: ignore[misc]
            break
        cut += 1
        made = log_forecast(planned(name), "kills", None, store)
        assert [r.forecast_run_id for r in read_ledger("kills", store) if r.forecast_id == name] == [made.mlflow_run_id]
    assert cut == 3  # create, numbers, end
    train(store, "kills", "k0", 3.0)
    for allowed in range(20):
        if not killed_at(monkeypatch, store, allowed, lambda: settle(read_ledger("kills", store), store)):
            break
    assert allowed == 1
    row = next(r for r in read_ledger("kills", store) if r.forecast_id == "k0")
    assert row.status == "inside" and row.recorded
    history = mlflow_runs.client(store).get_metric_history(row.forecast_run_id, "loss")
    assert [point.value for point in history] == [3.0]


def test_scores_over_experiments_and_the_command(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, losses in (("ours", (3.0, 3.05, 3.2)), ("theirs", (2.95,))):
        for number, loss in enumerate(losses):
            log_forecast(planned(f"{name}{number}"), name, tracking_uri=store)
            train(store, name, f"{name}{number}", loss)
    log_forecast(planned("ours-open"), "ours", tracking_uri=store)
    out, figure = tmp_path / "ledger.json", tmp_path / "ledger.png"
    arguments = ["--tracking-uri", store, "--json", str(out), "--plot", str(figure)]
    assert ledger.main([*arguments, "--experiment", "ours"]) == 0
    text = capsys.readouterr().out
    assert "ours: 2 of 3 inside" in text and "1 open" in text
    total = json.loads(out.read_text())["scores"]["ours"]
    assert total["error"] == pytest.approx((0.0 + 0.05 / 3 + 0.2 / 3) / 3)
    assert total["interval_score"] == pytest.approx((0.2 + 0.2 + 4.2) / 3)
    assert figure.read_bytes().startswith(b"\x89PNG")

    give = ["--tracking-uri", store, "--experiment", "ours", "--give-up"]
    assert ledger.main([*give, "ours-open", "--reason", "no more money"]) == 0
    assert "ours: 2 of 4 inside" in (text := capsys.readouterr().out) and "no more money" in text
    assert ledger.main([*give, "ours0"]) == 2 and "an outcome stays" in capsys.readouterr().err
    assert ledger.main(["--tracking-uri", store, "--experiment", "nowhere"]) == 2
    assert ledger.main(["--tracking-uri", store]) == 0
    assert "all experiments: " in capsys.readouterr().out


def test_scores_by_hand() -> None:
    # Clopper and Pearson 1934 for 8 of 10; Gneiting and Raftery 2007, equation 43.
    ends = binomial_interval(8, 10)
    assert (ends.low, ends.high) == (pytest.approx(0.4439, abs=1e-4), pytest.approx(0.9748, abs=1e-4))
    assert interval_score(2.0, 4.0, 3.0) == 2.0
    assert interval_score(2.0, 4.0, 4.5, level=0.8) == pytest.approx(2.0 + 10 * 0.5)
