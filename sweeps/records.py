"""Run tables from CSV files and from MLflow.

An MLflow cell is a run with tag `scalewright.kind = cell`. One row per cell: a rerun leaves two runs of one cell, the
newest finished one counts and the others are listed as excluded. Diverged, failed and unfinished runs are listed too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plugins.loggers.history import latest
from sweeps.csv_table import read_csv_rows
from sweeps.mlflow_runs import KIND, client, require_store, search_all
from sweeps.scaling.table import LARGEST_LOSS, Excluded, Run, RunTable
from sweeps.where import row_filter

PARENT = "sweep_run_id"  # column of a cell's parent run, beside its params and metrics
# Statuses a cell may carry in the tag scalewright.status that make it unusable.
BAD_STATUS = {"diverged", "failed", "running", "interrupted", "superseded", "stopped"}

# Column of each quantity: in a CSV its header; in MLflow a param or metric.
CSV_COLUMNS = {"n": "N_params", "d": "D_tokens", "c": "C_flops", "loss": "loss", "budget": "C_budget", "run": "run"}
MLFLOW_COLUMNS = {
    "n": "n_params",
    "d": "d_tokens",
    "c": "c_flops",
    "loss": "val_loss",
    "budget": "budget_flops",
    "run": "cell_id",
}
REQUIRED = ("n", "d", "loss")
# Columns that become typed attributes of a run, with the names they go by; the first that is there counts.
OPTIONAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "lr": ("lr",),
    "batch_tokens": ("batch_tokens", "global_batch_tokens"),
    "d_model": ("d_model",),
    "n_layers": ("n_layers",),
    "n_non_embedding": ("n_params_non_embedding", "N_non_embedding", "n_non_embedding"),
    "unique_tokens": ("unique_tokens", "U_unique_tokens"),
    "source": ("source",),
}


def read_runs(
    source: str,
    columns: Mapping[str, str | None] | None = None,
    where: str | None = None,
    tracking_uri: str | None = None,
    parent_run_id: str | None = None,
) -> RunTable:
    """Reads a run table.

    Args:
        source: a CSV file, or `mlflow:EXPERIMENT`.
        columns: column names to use in place of the defaults, keys n, d, c, loss, budget, run and those of
            OPTIONAL_COLUMNS.
        where: an expression over columns; rows for which it is false are left out.
        tracking_uri: of MLflow; None takes MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here.
        parent_run_id: only cells of this sweep; None takes all cells of the experiment.

    Raises:
        ValueError: missing file, experiment or column, or a `where` that cannot be evaluated.
    """
    given = {key: name for key, name in (columns or {}).items() if name}
    if source.startswith("mlflow:"):
        return read_mlflow(source.removeprefix("mlflow:"), given, where, tracking_uri, parent_run_id)
    return read_csv(Path(source), given, where)


def read_csv(path: Path, columns: Mapping[str, str], where: str | None = None) -> RunTable:
    """Reads a CSV with a header. Without a C column C = 6 N D; a line without a name is a run of its own."""
    found = read_csv_rows(path)
    names = _resolve(CSV_COLUMNS, columns, found.header, str(path))
    keep = row_filter(where)
    runs, excluded = [], []
    seen: dict[tuple[object, ...], int] = {}
    for line, texts in found.rows:
        if texts is None:
            excluded.append(Excluded(f"line {line}", f"more than the header's {len(found.header)} values"))
            continue
        row = {key: parse(text) for key, text in texts.items()}
        name = texts[names["run"]] if "run" in names else ""
        label = name or f"line {line}"
        if not keep(row):
            continue
        try:
            run = _run(label, row, names)
        except ValueError as error:
            excluded.append(Excluded(label, str(error)))
            continue
        same = (name or tuple(texts.values()), run.n_params, run.d_tokens, run.c_flops, run.loss)
        if (first := seen.setdefault(same, line)) == line:
            runs.append(run)
        else:
            excluded.append(Excluded(label, f"line {line} repeats line {first}: a copy tells nothing about noise"))
    if where and found.rows and not (runs or excluded):
        raise ValueError(f"--where {where!r} holds for none of the {len(found.rows)} rows of {path}")
    convention = f"column {names['c']}" if "c" in names else "6ND"
    return RunTable.from_runs(runs, excluded, convention, f"column {names['n']}")


def _resolve(
    defaults: Mapping[str, str], given: Mapping[str, str], header: Iterable[str], place: str
) -> dict[str, str]:
    """Column per quantity; named ones must exist, default ones may be missing unless required."""
    header = list(header)
    names = {}
    for key, default in defaults.items():
        name = given.get(key, default)
        if name in header:
            names[key] = name
        elif key in given or key in REQUIRED:
            raise ValueError(f"{place} has no column {name!r} (--columns.{key}); it has {', '.join(header)}")
    for key in OPTIONAL_COLUMNS.keys() & given.keys():
        if given[key] not in header:
            raise ValueError(f"{place} has no column {given[key]!r} (--columns.{key}); it has {', '.join(header)}")
        names[key] = given[key]
    return names


def _run(label: str, row: Mapping[str, object], names: Mapping[str, str]) -> Run:
    value = {key: _number(row.get(names[key]), names[key]) for key in ("n", "d", "c", "loss", "budget") if key in names}
    used = {name for key, name in names.items() if key not in OPTIONAL_COLUMNS}
    return Run(
        run=label,
        n_params=value["n"],
        d_tokens=value["d"],
        c_flops=value.get("c", 6 * value["n"] * value["d"]),
        loss=value["loss"],
        budget=value.get("budget"),
        extra={key: item for key, item in row.items() if key not in used},
        **_optional(row, names),
    )


def _optional(row: Mapping[str, object], names: Mapping[str, str]) -> dict[str, Any]:
    """Typed attributes of a run: numbers that are not finite or not numbers count as missing."""
    found: dict[str, Any] = {}
    for key, defaults in OPTIONAL_COLUMNS.items():
        candidates = (names[key],) if key in names else defaults
        value = next((row[name] for name in candidates if row.get(name) not in (None, "")), None)
        if key == "source":
            found[key] = None if value is None else str(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[key] = float(value)
    return found


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, not a number" if value not in (None, "") else f"{name} is missing")
    return float(value)


def parse(text: str | None) -> object:
    """Text of a cell -> float, bool, None for empty, else the text."""
    if text is None or text == "":
        return None
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text


def read_mlflow(
    experiment: str,
    columns: Mapping[str, str] | None = None,
    where: str | None = None,
    tracking_uri: str | None = None,
    parent_run_id: str | None = None,
) -> RunTable:
    """Cells of an MLflow experiment as a run table; see the module's description for what is excluded."""
    names = {**MLFLOW_COLUMNS, **(columns or {})}
    keep = row_filter(where)
    cells: dict[str, list[tuple[Any, dict[str, object]]]] = {}
    query = f"tags.`{KIND}` = 'cell'"
    if parent_run_id:
        if not re.fullmatch(r"[\w-]+", parent_run_id):
            raise ValueError(f"--sweep is {parent_run_id!r}, which is no MLflow run id")
        query += f" and tags.`mlflow.parentRunId` = '{parent_run_id}'"
    require_store(tracking_uri)
    mlflow_client = client(tracking_uri)
    found = search_all(mlflow_client, experiment, query)
    if parent_run_id and not found:
        raise ValueError(f"experiment {experiment!r} has no cells of a sweep {parent_run_id!r} (--sweep)")
    for run in found:
        row = _row(mlflow_client, run)
        if keep(row):
            label = str(
                run.data.tags.get("scalewright.cell_id") or run.data.params.get(names["run"]) or run.info.run_id
            )
            cells.setdefault(label, []).append((run, row))
    if where and found and not cells:
        raise ValueError(f"--where {where!r} holds for none of the {len(found)} cells of {experiment!r}")
    runs, excluded = [], []
    for label, tries in sorted(cells.items()):
        usable = next((i for i, (run, _) in enumerate(tries) if _why_not(run) is None), None)
        for i, (run, row) in enumerate(tries):
            name = f"{label} ({run.info.run_id[:8]})"
            if i != usable:
                excluded.append(Excluded(name, _why_not(run) or "older run of a cell that was run again"))
                continue
            try:
                runs.append(_run(label, row, names))
            except ValueError as error:
                excluded.append(Excluded(name, str(error)))
    return RunTable.from_runs(runs, excluded, _one(cells, "flops_convention"), _one(cells, "n_convention"))


def _row(mlflow_client: Any, run: Any) -> dict[str, object]:
    """Params and metrics by name; metrics win, but for the learning rate, whose metric ends where the decay ends.

    Diverged metrics come back as NaN or as the largest double.
    """
    row: dict[str, object] = {key: parse(text) for key, text in run.data.params.items()}
    row[PARENT] = run.data.tags.get("mlflow.parentRunId")
    for key, value in latest(mlflow_client, run).items():
        if key == "lr" and key in row:
            continue
        row[key] = math.inf if value >= LARGEST_LOSS else value
    return row


def _why_not(run: Any) -> str | None:
    status = run.data.tags.get("scalewright.status", "").lower()
    if status in BAD_STATUS:
        return f"cell is {status}"
    if run.info.status != "FINISHED":
        return f"run is {run.info.status.lower()}, not finished"
    return None


def _one(cells: Mapping[str, list[tuple[Any, dict[str, object]]]], param: str) -> str:
    """The one value all cells share, or the values joined (a mix is the reader's to notice)."""
    values = {str(run.data.params[param]) for tries in cells.values() for run, _ in tries if param in run.data.params}
    return " and ".join(sorted(values)) or "as given"
