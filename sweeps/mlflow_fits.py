"""Fits in MLflow: one run each, named so that the UI compares them side by side, with figures and a loadable model.

Sweep (parent) > cells and fits. Metric names are short enough to be columns; see docs/reports.md for their meaning.
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
import urllib.parse
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plugins.loggers import tracking
from sweeps.fit_model import fit_model, save
from sweeps.fit_report import FitReport
from sweeps.mlflow_runs import KIND, client, experiment_id, log_run
from sweeps.plots import plot_all, plot_scaling
from sweeps.records import PARENT
from sweeps.scaling.analysis import Result
from sweeps.scaling.bootstrap import Interval
from sweeps.scaling.table import RunTable

MODEL = "model"  # folder of the loadable model in a fit run's artifacts
# MLflow 3's UI opens in its GenAI mode whatever kind an experiment has, unless the address says otherwise.
_CLASSIC = "workflowType=machine_learning"
_VIEW = "scalewright-fits"
_COLUMNS = ("a", "a_lo", "a_hi", "n_opt", "n_lo", "n_hi", "d_opt", "loss_pred", "loss_lo", "loss_hi", "holdout_err")
_BEGIN, _END = "<!-- fit -->", "<!-- /fit -->"


def log_fit(
    report: FitReport, experiment: str, parent_run_id: str | None = None, tracking_uri: str | None = None
) -> dict[str, str]:
    """Logs each approach as its own MLflow run (kind `fit`), for the UI to compare.

    Args:
        parent_run_id: the sweep to nest the fits under; None takes the one all cells came from, if it is one.

    Returns:
        run ids by approach.
    """
    analysis = report.analysis
    parent = parent_run_id or _only_parent(analysis.table)
    ids: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        figures = plot_all(analysis, Path(place) / "figures")
        numbers = Path(place) / "fit.json"
        numbers.write_text(json.dumps(report.as_dict(), indent=1))
        for name, result in analysis.results.items():
            model = Path(place) / name / MODEL
            save(fit_model(result, analysis.table), model)
            note = f"```\n{report.text()}\n```"
            own = _own_figure(report, name, model.parent / "fit.png")
            ids[name] = log_run(
                experiment, f"fit-{name}", {KIND: "fit"}, fit_params(report, name), fit_metrics(result),
                [*figures, own, numbers, model], parent, tracking_uri, note,
            )  # fmt: skip
    describe_fits(experiment, list(ids.values()), report.text(), tracking_uri)
    return ids


def _own_figure(report: FitReport, approach: str, path: Path) -> Path:
    """This approach alone, so that a comparison in the UI shows different figures side by side."""
    plot_scaling(replace(report.analysis, results={approach: report.analysis.results[approach]}), path)
    return path


def _only_parent(table: RunTable) -> str | None:
    parents = {run.extra.get(PARENT) for run in table.runs}
    return str(parents.pop()) if len(parents) == 1 and None not in parents else None


def fit_params(report: FitReport, approach: str) -> dict[str, object]:
    """What a fit stood on, as MLflow params."""
    result, table = report.analysis.results[approach], report.analysis.table
    return {
        "approach": approach,
        "flops_convention": table.convention,
        "n_convention": table.n_convention,
        "n_runs": len(table),
        "n_excluded": len(table.excluded),
        "budgets": " ".join(f"{b:g}" for b in table.budgets),
        "bootstrap": report.bootstrap,
        "scheme": result.replicates.scheme if result.replicates else "none",
        "source": report.source,
        "flags": "; ".join(result.flags) or "none",
        "verdict": report.analysis.verdict,
    }


def fit_metrics(result: Result) -> dict[str, float]:
    """One approach's numbers as MLflow metrics: short names, only finite values.

    Those of the decision (n_opt, d_opt, loss_pred, lr_opt, ... and their ends) are of the first target budget.
    """
    metrics = _with_ends("a", result.a, result.a_interval) | _with_ends("b", result.b, result.b_interval)
    metrics |= _with_ends("e", result.e, result.e_interval)
    if result.holdout.last is not None:
        metrics |= {"holdout_err": result.holdout.last.error, "holdout_size": result.holdout.relative_error}
    if result.decisions:
        d = result.decisions[0]
        metrics |= {"budget": d.budget, "n_opt": d.n_opt, "d_opt": d.d_opt, "loss_pred": d.loss}
        for name, ends in (("n", d.n_interval), ("d", d.d_interval), ("loss", d.loss_interval)):
            metrics |= {f"{name}_lo": ends.low, f"{name}_hi": ends.high}
        metrics |= {
            "lr_opt": d.lr,
            "lr_lo": d.lr_interval.low,
            "lr_hi": d.lr_interval.high,
            "batch_opt": d.batch_tokens,
        }
    if result.bias is not None:
        metrics |= {"bias_a": result.bias.a, "bias_n": result.bias.n_opt}
    metrics |= {
        name: value
        for name, value in result.model.parameters.items()
        if isinstance(value, float) and name.lower() not in metrics
    }
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def _with_ends(name: str, value: float, ends: Interval) -> dict[str, float]:
    return {name: value, f"{name}_lo": ends.low, f"{name}_hi": ends.high}


def describe_fits(experiment: str, run_ids: Sequence[str], text: str, tracking_uri: str | None = None) -> None:
    """Writes the last fit into the experiment's description, with links that open the comparison and a table of fits.

    The part between the two markers is replaced; what others wrote there stays.
    """
    mlflow_client = client(tracking_uri)
    found = mlflow_client.get_experiment_by_name(experiment)
    before, _, rest = found.tags.get("mlflow.note.content", "").partition(_BEGIN)
    after = rest.partition(_END)[2]
    links = (
        f"[Compare the fits]({compare_link(found.experiment_id, run_ids)}), "
        f"[all fits as a table]({table_link(found.experiment_id)}), "
        f"[all runs]({runs_link(found.experiment_id)})"
    )
    block = f"{_BEGIN}\n## Last fit\n\n{links}\n\n```\n{text}\n```\n{_END}"
    for key, value in (
        ("mlflow.experimentKind", "custom_model_development"),
        (f"mlflow.sharedViewState.{_VIEW}", _view_state()),
        ("mlflow.note.content", before + block + after),
    ):
        mlflow_client.set_experiment_tag(found.experiment_id, key, value)


def compare_link(experiment_id: str, run_ids: Sequence[str]) -> str:
    """Address of the comparison of runs, relative to the MLflow server."""
    quoted = ",".join(f'"{run_id}"' for run_id in run_ids)
    query = urllib.parse.quote(f'runs=[{quoted}]&experiments=["{experiment_id}"]', safe="=&")
    return f"#/compare-runs?{query}&{_CLASSIC}"


def table_link(experiment_id: str) -> str:
    """Address of the experiment's fits with their metrics as columns, relative to the MLflow server."""
    return f"{runs_link(experiment_id)}&viewStateShareKey={_VIEW}"


def runs_link(experiment_id: str) -> str:
    """Address of the experiment's runs, with its description above them, relative to the MLflow server."""
    return f"#/experiments/{experiment_id}/runs?{_CLASSIC}"


def where_to_look(experiment: str, tracking_uri: str | None = None) -> str:
    """One line: the address at which a browser shows an experiment's fits as a table.

    A database without a server gets the address it will have under `mlflow ui`.
    """
    uri = tracking_uri or tracking.tracking_uri()
    link = table_link(experiment_id(client(uri), experiment))
    if uri.startswith("http"):
        return f"{uri.rstrip('/')}/{link}"
    return f"http://localhost:5000/{link} once `mlflow ui --backend-store-uri {uri}` runs"


def _view_state() -> str:
    """The UI's own form of a shared view: JSON, deflated. Without one its table shows no metrics."""
    state = {
        "searchFilter": f"tags.{KIND} = 'fit'", "orderByKey": "attributes.start_time", "orderByAsc": False,
        "startTime": "ALL", "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": [f"metrics.`{name}`" for name in _COLUMNS], "runsExpanded": {}, "runsPinned": [],
        "runsHidden": [], "viewMaximized": True, "runListHidden": False,
    }  # fmt: skip
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
