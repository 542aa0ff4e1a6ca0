"""One rank of a cell of several processes: recipes.pretrain, which ends when the process that started it does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From here on this process ends when SCALEWRIGHT_PARENT does, a SIGKILL included: nobody else would end it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["SCALEWRIGHT_PARENT"]):
        sys.exit(1)  # it died in between


def main() -> int:
    """Exit status of recipes.pretrain."""
    die_with_parent()
    from recipes.pretrain import main as pretrain

    return pretrain()


if __name__ == "__main__":
    sys.exit(main())
