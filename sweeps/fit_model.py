"""A fit as a loadable MLflow model: loss with its interval at any N and D, size and tokens for any budget.

    model = mlflow.pyfunc.load_model("runs:/RUN_ID/model")
    model.predict(pandas.DataFrame({"N": [1e9], "D": [2e10]}))        # loss, loss_lo, loss_hi
    model.predict(pandas.DataFrame({"budget": [1e21]}))               # n_opt, n_lo, n_hi, d_opt, ..., loss_opt

The model is numbers (parameters and bootstrap replicates), no pickle; the few modules that read them travel with it, so
numpy, scipy, pandas and MLflow are enough to load it.
"""

from __future__ import annotations

import ast
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.scaling import store
from sweeps.scaling.analysis import Result
from sweeps.scaling.optimum import FlopRule, flop_rule
from sweeps.scaling.table import FitError, RunTable

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("N", "D", "C", "budget")
LOSS_COLUMNS = ("loss", "loss_lo", "loss_hi")
BUDGET_COLUMNS = ("n_opt", "n_lo", "n_hi", "d_opt", "d_lo", "d_hi", "loss_opt", "loss_opt_lo", "loss_opt_hi")


@dataclass(frozen=True)
class FitModel:
    """Answers from a stored fit.

    Attributes:
        result: one approach's fit, with its replicates.
        rule: FLOPs of (N, D) under the runs' convention, for rows without C; None where the table shows no rule.
    """

    result: Result
    rule: FlopRule | None

    def loss(self, n_params: float, d_tokens: float, c_flops: float) -> tuple[float, float, float]:
        """Loss of one run in nats per token with the ends of its 95% interval."""
        ends = self.result.forecast_interval(n_params, d_tokens, c_flops)
        return self.result.model.loss_at(n_params, d_tokens, c_flops), ends.low, ends.high

    def optimum(self, c_flops: float) -> tuple[float, ...]:
        """N* (parameters), D* (tokens) and the loss there (nats per token) for a budget, each with interval ends."""
        model = self.result.model
        n, d = model.n_opt(c_flops), model.d_opt(c_flops)
        n_ends, d_ends = self.result.size_intervals(c_flops)
        ends = self.result.forecast_interval(n, d, c_flops)
        loss = model.loss_at(n, d, c_flops)
        return n, n_ends.low, n_ends.high, d, d_ends.low, d_ends.high, loss, ends.low, ends.high

    def predict(self, data: Any, params: Any = None) -> Any:
        """MLflow's entry.

        Args:
            data: pandas.DataFrame; columns N (parameters) and D (tokens) with or without C (FLOPs), or budget (FLOPs),
                or both.

        Returns:
            pandas.DataFrame, the same index: LOSS_COLUMNS for N and D, BUDGET_COLUMNS for budget.

        Raises:
            FitError: neither pair of columns is there, a value is not positive, or FLOPs cannot be told.
        """
        import pandas as pd

        given = [name for name in INPUTS if name in data.columns and not data[name].isna().all()]
        if not ({"N", "D"} <= set(given) or "budget" in given):
            raise FitError(f"give columns N and D, or budget; the table has {', '.join(map(str, data.columns))}")
        for name in given:
            if not (data[name] > 0).all():
                raise FitError(f"column {name} holds values that are not positive numbers")
        columns: dict[str, list[float]] = {}
        if {"N", "D"} <= set(given):
            n, d = data["N"].astype(float), data["D"].astype(float)
            c = data["C"].astype(float) if "C" in given else [self._flops(*pair) for pair in zip(n, d, strict=True)]
            rows = [self.loss(*point) for point in zip(n, d, c, strict=True)]
            columns |= {name: [row[i] for row in rows] for i, name in enumerate(LOSS_COLUMNS)}
        if "budget" in given:
            optima = [self.optimum(float(budget)) for budget in data["budget"]]
            columns |= {name: [row[i] for row in optima] for i, name in enumerate(BUDGET_COLUMNS)}
        return pd.DataFrame(columns, index=data.index)

    def _flops(self, n_params: float, d_tokens: float) -> float:
        if self.rule is None:
            raise FitError("the fitted runs show no rule for FLOPs; give a column C")
        return float(self.rule.flops_per_parameter_token(n_params) * n_params * d_tokens)  # type: ignore[arg-type]


def fit_model(result: Result, table: RunTable) -> FitModel:
    """The model of one approach's fit of a table."""
    try:
        return FitModel(result, flop_rule(table))
    except (FitError, ValueError):
        return FitModel(result, None)


def save(model: FitModel, folder: Path) -> None:
    """Writes an MLflow model (flavor python_function) into a folder that does not exist yet."""
    from mlflow.models import ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    inputs = Schema([ColSpec(AnyType(), name, required=False) for name in INPUTS])
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        store.write({"result": model.result, "rule": model.rule}, Path(place) / "fit")
        # Which columns an example should hold is the caller's choice, and the signature says what there is.
        warnings.filterwarnings("ignore", message=".*input example was not provided.*")
        save_model(
            path=str(folder),
            loader_module=__name__,
            data_path=str(Path(place) / "fit"),
            code_paths=_copy_modules(__name__, Path(place) / "code"),
            pip_requirements=[f"{name}>={version}" for name, version in _installed("numpy", "scipy", "pandas")],
            signature=ModelSignature(inputs=inputs),
        )


def _load_pyfunc(path: str) -> FitModel:
    """MLflow calls this by name when the model is loaded."""
    return FitModel(**store.read(Path(path)))


def _installed(*packages: str) -> list[tuple[str, str]]:
    from importlib.metadata import version

    return [(name, ".".join(version(name).split(".")[:2])) for name in packages]


def _copy_modules(start: str, folder: Path) -> list[str]:
    """Copies a module of this project and all project modules it imports, as packages; returns the top folders."""
    for name in sorted(_imported(start)):
        path = _file(name)
        assert path is not None
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return [str(path) for path in sorted(folder.iterdir())]


def _imported(start: str) -> set[str]:
    """Names of this project's modules that a module needs, itself and their packages included."""
    found: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        path = _file(name)
        if name in found or path is None:
            continue
        found.add(name)
        todo.append(name.rpartition(".")[0])
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                todo += [alias.name for alias in node.names]
    return found


def _file(name: str) -> Path | None:
    """Source of a module of this project; None for all other names."""
    place = ROOT.joinpath(*name.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if name and path.is_file():
            return path
    return None
