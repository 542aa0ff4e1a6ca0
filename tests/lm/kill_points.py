"""Kills `prepare` by SIGKILL at chosen changes of files; run as a script, since it forks: FILES OUT COUNT.

For each of COUNT changes, spread evenly over a run from start to end: a child that dies just before it, another that
runs to the end, and a line of JSON: what is in the output (path -> sha256), what else lies around.
"""

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm.data.pipeline import funnel_plot
from lm.data.pipeline.stage import StageSpec
from lm.data.prepare import PrepareConfig, prepare
from tests.lm.test_data_prepare import config_of, contents

CHANGES = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync")


def staged(files: Path) -> PrepareConfig:
    """Stages of each way to keep an outcome: positions, texts, over all sources."""
    config = config_of(files)
    kinds = ("exact_documents", "pii", "exact_paragraphs")
    first = replace(config.sources[0], stages=tuple(map(StageSpec, kinds)))
    shared = (StageSpec("exact_documents"), StageSpec("exact_paragraphs"))
    return replace(config, sources=(first, *config.sources[1:]), stages=shared)


def draw_once() -> None:
    """The same funnel is drawn once, then copied: drawing would be most of every child's time."""
    draw, drawn = funnel_plot.plot_funnel, dict[str, bytes]()

    def plot_funnel(rows: dict[str, Any], path: Path) -> None:
        if (key := json.dumps(rows)) in drawn:
            path.write_bytes(drawn[key])
        else:
            draw(rows, path)
            drawn[key] = path.read_bytes()

    funnel_plot.plot_funnel = plot_funnel


def in_a_child(config: PrepareConfig, out: Path, die_at: int, total: Path | None = None) -> int:
    """Exit status of a `prepare`; it ends itself at change `die_at`, counted from 1.

    Args:
        total: file to which the number of changes is written.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    count = [0]

    def counted(function: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if writes(*arguments):
                count[0] += 1
                if count[0] == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    io.open = counted(io.open, lambda file, mode="r", *rest: isinstance(file, Path) and mode[0] in "wa")
    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name), lambda *rest: True))
    try:
        prepare(config, out, overwrite=True)
        if total:
            total.write_text(str(count[0]))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def around(out: Path) -> list[str]:
    """What lies beside the output, and below what is kept beside it."""
    found = [path for hidden in out.parent.glob(f".{out.name}.*") for path in (hidden, *hidden.rglob("*"))]
    return sorted(str(path.relative_to(out.parent)) for path in found)


def main(files: Path, out: Path, kills: int) -> None:
    """One line of JSON an attempt; the first is not killed."""
    draw_once()
    config, former = staged(files), config_of(files, vocab_size=300)
    prepare(config, files / "imports-everything")
    prepare(former, files / "former")
    count = files / "count"
    at = [0]  # no kill
    for die_at in at:
        for path in (out, *out.parent.glob(f".{out.name}.*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.copytree(files / "former", out)
        if die_at:
            assert in_a_child(config, out, die_at) == -signal.SIGKILL
        status = in_a_child(config, out, 0, count)
        print(json.dumps([status, contents(out), around(out)]), flush=True)
        if not die_at:
            changes = int(count.read_text())
            at += [1 + number * (changes - 1) // (min(kills, changes) - 1) for number in range(min(kills, changes))]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
