"""Standard benchmarks by lm-evaluation-harness, on an exported model; the extra `benchmarks` installs it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm.errors import ConfigError


def run_benchmarks(folder: Path, tasks: Sequence[str], limit: int | None, device: str) -> dict[str, dict[str, Any]]:
    """Results by task and group: the harness's own numbers under its own names (acc,none), and the number of questions.

    A task whose metric_list names nothing that the harness measures has no numbers, and 0 questions.

    Args:
        folder: a Hugging Face folder, see recipes.export. Its tokenizer is used as it is.
        tasks: names that the harness knows (it downloads their questions), or task files (.yaml) of one's own, which
            may read local questions.
        limit: questions a task at most.

    Raises:
        ConfigError: the harness is not installed, `folder` is no exported model, a task is unknown or fails to load, or
            nothing at all was measured.
    """
    own = check_tasks(folder, tasks)
    names = [task for task in dict.fromkeys(tasks) if not _is_file(task)]
    if not names:  # nothing of the hub is asked for, so nothing should ask the hub
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    with _quiet():
        return _run(folder, names, own, limit, device)


def check_tasks(folder: Path, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """What the task files among `tasks` hold; see run_benchmarks for the arguments and the error."""
    import yaml

    if find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs lm-evaluation-harness: pip install 'scalewright[benchmarks]'")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--tasks runs on an exported model, {folder} is none; first:"
            f" python -m recipes.export --ckpt_path {folder} --out DIR"
        )
    found = []
    for path in dict.fromkeys(Path(task) for task in tasks if _is_file(task)):
        if not path.is_file():
            raise ConfigError(f"--tasks {path}: no such file")
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"--tasks {path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict) or not {"task", "dataset_path"} <= values.keys():
            raise ConfigError(f"--tasks {path} must have task, dataset_path and more, see docs/evaluation.md")
        found.append(values)
    return found


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _run(
    folder: Path, names: list[str], own: list[dict[str, Any]], limit: int | None, device: str
) -> dict[str, dict[str, Any]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    try:
        found = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32", "trust_remote_code": False},
            tasks=[*names, *own],
            limit=limit,
            device=device,
            batch_size=8,
            bootstrap_iters=1000,
            log_samples=False,
            task_manager=TaskManager(verbosity="ERROR", include_defaults=bool(names)),
        )
    except Exception as error:  # whatever a task file, its questions or its templates make of the harness
        cause = error.__cause__ or error  # of datasets: "An error occurred", from what did
        said = f"{type(cause).__name__} {' '.join(str(cause).split())}".strip()
        raise ConfigError(f"--tasks {' '.join([*names, *(one['task'] for one in own)])}: {said[:300]}") from None
    assert found is not None
    return measured(found)


def measured(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What simple_evaluate returned, as run_benchmarks returns it."""
    rows = {name: {key: value for key, value in row.items() if "," in key} for name, row in found["results"].items()}
    if not any(rows.values()):
        raise ConfigError(
            f"--tasks {' '.join(rows)}: nothing was measured; metric_list must name metrics of the harness"
        )
    groups = found["group_subtasks"]
    return {
        name: {**row, "questions": _questions(found, name)} for name, row in rows.items() if row or name not in groups
    }


def _questions(found: Mapping[str, Any], name: str) -> int:
    """Of a task, or of all tasks of a group."""
    if name in found["n-samples"]:
        return int(found["n-samples"][name]["effective"])
    return sum(_questions(found, child) for child in found["group_subtasks"].get(name, ()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness prints progress on stdout; results of this command are to be read there."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
