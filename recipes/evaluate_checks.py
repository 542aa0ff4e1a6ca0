"""What `recipes.evaluate` can refuse before a model is loaded: an hour of scoring is not to end in a wrong option."""

from __future__ import annotations

import argparse
import math

from lm.errors import ConfigError
from recipes.benchmarks import check_tasks
from recipes.files import check_places


def check_options(options: argparse.Namespace) -> None:
    """Every option and every file that is read or written.

    Raises:
        ConfigError: the first that is wrong.
    """
    _check_what(options)
    _check_numbers(options)
    _check_device(options.device)
    check_places((options.json,), (options.plots,))
    _check_files(options)


def _check_what(options: argparse.Namespace) -> None:
    for name in ("probes", "positions", "contamination"):
        if getattr(options, name) and options.data is None:
            raise ConfigError(f"--{name} needs --data, the folder with the text")
    if not any((options.data, options.text, options.questions, options.prompt, options.tasks)):
        raise ConfigError("nothing to evaluate: give --data, --text, --questions, --tasks or --prompt")
    if options.contamination and not (options.questions or options.text):
        raise ConfigError("--contamination compares --questions and --text files with the training data; give some")


def _check_numbers(options: argparse.Namespace) -> None:
    from lm.evaluation.contamination import check_ngram
    from lm.generation import Sampling

    for name in ("window", "windows", "samples", "max_new_tokens", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if min(options.lengths or [1]) < 1:
        raise ConfigError(f"--lengths must be at least 1, got {min(options.lengths)}")
    if options.context is not None and options.context < 0:
        raise ConfigError(f"--context must be at least 0, got {options.context}")
    if not (math.isfinite(options.share) and 0 < options.share <= 1):
        raise ConfigError(f"--share must be above 0 and at most 1, got {options.share:g}")
    Sampling(options.temperature, options.top_p, options.seed)
    if options.contamination:
        check_ngram(options.ngram)


def _check_device(name: str) -> None:
    """A device that torch has here."""
    import torch

    try:
        known = torch.device(name).type in ("cpu", "cuda", "mps", "xpu")
        if known:
            torch.empty(1, device=name)
    except (RuntimeError, AssertionError):  # no such name; no such kind of device here; no such number
        known = False
    if not known:
        here = "cpu" if not torch.cuda.is_available() else f"cpu, cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        raise ConfigError(f"--device {name!r} is not on this machine, which has {here}")


def _check_files(options: argparse.Namespace) -> None:
    from lm.data.shards import load_manifest
    from lm.evaluation.long_context import check_task
    from lm.evaluation.questions import read_questions
    from lm.evaluation.text import encodable, read_documents
    from lm.generation import NO_TOKENS

    if options.data:
        load_manifest(options.data)
    if options.tasks:
        check_tasks(options.ckpt_path, options.tasks)
    for path in options.text or ():
        read_documents(path)
    for path in options.questions or ():
        read_questions(path)
    for number, prompt in enumerate(options.prompt or (), 1):
        if not prompt:
            raise ConfigError(f"--prompt, text {number}: {NO_TOKENS}")
        encodable(prompt, f"--prompt, text {number}")
    for task in options.probes or ():
        if task != "all":
            check_task(task)
