"""Standard benchmarks by lm-evaluation-harness, on an exported model; the extra `benchmarks` installs it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lm.errors import ConfigError


def run_benchmarks(folder: Path, tasks: Sequence[str], limit: int | None, device: str) -> dict[str, dict[str, Any]]:
    """Results by task: the harness's own numbers under its own names (acc,none), and the number of questions.

    Args:
        folder: a Hugging Face folder, see recipes.export. Its tokenizer is used as it is.
        tasks: names that the harness knows (it downloads their questions), or task files (.yaml) of one's own, which
            may read local questions.
        limit: questions a task at most.

    Raises:
        ConfigError: the harness is not installed, `folder` is no exported model, or a task is unknown or fails to load.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs lm-evaluation-harness: pip install 'scalewright[benchmarks]'")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"--tasks runs on an exported model, {folder} is none; first:"
            f" python -m recipes.export --ckpt_path {folder} --out DIR"
        )
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    absent = [str(path) for path in files if not path.is_file()]
    if absent:
        raise ConfigError(f"--tasks {absent[0]}: no such file")
    if len(files) == len(tasks):  # nothing of the hub is asked for, so nothing should ask the hub
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    with _quiet():
        return _run(folder, [task for task in tasks if Path(task) not in files], files, limit, device)


def _run(
    folder: Path, names: list[str], files: list[Path], limit: int | None, device: str
) -> dict[str, dict[str, Any]]:
    import yaml
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    own = [dict(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in files]
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
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise ConfigError(f"--tasks: {' '.join(str(error).split())[:300]}") from None
    assert found is not None
    counts = found["n-samples"]
    return {
        name: {**{key: value for key, value in row.items() if "," in key}, "questions": counts[name]["effective"]}
        for name, row in found["results"].items()
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness prints progress on stdout; results of this command are to be read there."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
