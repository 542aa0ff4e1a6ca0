"""Who may import whom, read from the syntax trees."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
ORDER = ["lm", "plugins", "recipes", "sweeps"]  # each may import those before it
LAZY = {
    "deepspeed",
    "flash_attn",
    "datatrove",
    "torchao",
    "transformers",
    "accelerate",
    "lm_eval",
}  # optional: only inside functions


@functools.cache
def modules() -> dict[Path, ast.Module]:
    files = [path for package in ORDER for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 20
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files}


@functools.cache
def imported(tree: ast.AST) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def tops(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imported(tree)}


def test_imports_run_one_way() -> None:
    for path, tree in modules().items():
        allowed = ORDER[: ORDER.index(path.parts[0]) + 1]
        for top in tops(tree) & set(ORDER):
            assert top in allowed, f"{path} imports {top}"


def test_pure_arithmetic_stays_pure() -> None:
    heavy = {"torch", "lightning", "ray", "mlflow"}
    for path, tree in modules().items():
        pure = path.parts[:2] in (("sweeps", "scaling"), ("lm", "planner"))
        if pure or path in (Path("lm/plan.py"), Path("lm/config.py")):
            assert not tops(tree) & heavy, path


def test_frameworks_stay_at_their_place() -> None:
    for path, tree in modules().items():
        names = tops(tree)
        if path.parts[0] == "lm" and path.name not in ("module.py", "datamodule.py"):
            assert "lightning" not in names, path
        if "ray" in names:
            at_home = path.parts[:2] == ("plugins", "executors") or path.parts[0] == "sweeps"
            assert at_home and path.parts[1] != "scaling", path
        if "mlflow" in names:
            assert path.parts[:2] == ("plugins", "loggers") or path.parts[0] == "sweeps", path


def test_optional_packages_are_imported_where_used() -> None:
    for path, tree in modules().items():
        lazy = LAZY | ({"ray"} if path.parts[0] == "plugins" else set())  # preparing data does without it
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not tops(node) & lazy, f"{path} imports an optional package at import time"
