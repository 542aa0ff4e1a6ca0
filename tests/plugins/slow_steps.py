"""Processes that tests kill: runs of the recipe, or a few lines of code. They are forked (tests/processes.py)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from tests import processes


class SlowSteps(Callback):
    """Each step takes `seconds` longer."""

    def __init__(self, seconds: float = 0.05):
        self.seconds = seconds

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)


def preload() -> None:
    """Begin to import the recipe in the server that processes are forked from."""
    processes.context().Process(target=_nothing).start()


def start_run(arguments: list[str], environment: dict[str, str], log: Path) -> Any:
    """`python -m recipes.pretrain ARGUMENTS` as a process of its own; its stderr is appended to `log`."""
    return processes.start_pretrain(arguments, environment, log)


def start_code(code: str, run_dir: Path) -> Any:
    """Python statements as a process of its own, with `run_dir` and this process' environment."""
    process = processes.context().Process(target=_code, args=(code, run_dir, dict(os.environ)))
    process.start()
    return process


def _code(code: str, run_dir: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    exec(code, {"run_dir": run_dir})


def _nothing() -> None:
    pass
