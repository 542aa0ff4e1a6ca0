"""Parts for the tests of executors; a worker imports nothing else for them, so that it starts fast."""

import os
import signal
import time
from pathlib import Path

from lm.data.files import DataError


def slow_square(n: int, log: str) -> int:
    """Number 0 ends after number 1 has, which another process must have taken; tells who ran."""
    late = time.monotonic() + 60
    while n == 0 and not (Path(log).exists() and Path(log).read_text()) and time.monotonic() < late:
        time.sleep(0.01)
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {n}\n")
    return n * n


def die_once(n: int, folder: str) -> int:
    """Ends its own process the first time that number 3 comes."""
    mark = Path(folder, "died")
    if n == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def die_always(n: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return n


def refuse(n: int) -> int:
    raise DataError(f"part {n} is refused")
