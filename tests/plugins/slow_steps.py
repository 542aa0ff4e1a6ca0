"""Processes that tests kill: runs of the recipe, or a few lines of code. They are forked from one that has imported it
all, which costs 10 seconds of CPU once and not each time."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

_CONTEXT = multiprocessing.get_context("forkserver")


class SlowSteps(Callback):
    """Each step takes `seconds` longer."""

    def __init__(self, seconds: float = 0.05):
        self.seconds = seconds

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)


def preload() -> None:
    """Begin to import the recipe in the server that processes are forked from."""
    _CONTEXT.set_forkserver_preload(["recipes.build", "recipes.pretrain", "mlflow.tracking", __name__])
    process = _CONTEXT.Process(target=_nothing)
    process.start()


def start_run(arguments: list[str], environment: dict[str, str], log: Path) -> Any:
    """`python -m recipes.pretrain ARGUMENTS` as a process of its own; its output is appended to `log`."""
    process = _CONTEXT.Process(target=_pretrain, args=(arguments, environment, log))
    process.start()
    return process


def start_code(code: str, run_dir: Path) -> Any:
    """Python statements as a process of its own, with `run_dir` and this process' environment."""
    process = _CONTEXT.Process(target=_code, args=(code, run_dir, dict(os.environ)))
    process.start()
    return process


def _code(code: str, run_dir: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    exec(code, {"run_dir": run_dir})


def _nothing() -> None:
    pass


def _pretrain(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv = ["recipes.pretrain", *arguments]
    import torch

    from recipes.pretrain import main

    torch.set_num_threads(1)
    sys.exit(main())
