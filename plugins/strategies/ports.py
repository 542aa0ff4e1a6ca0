"""A port for the processes of a run to meet at."""

from __future__ import annotations

import os
import random
import socket

from lm.errors import ConfigError

# Below the ports that systems hand out by themselves (32768 on), above those of Ray's workers (up to 19999): a port
# that is free now must still be free when the processes have started, seconds later, whatever else begins in between.
_PORTS = range(20_000, 32_000)


def free_port(tries: int = 100) -> int:
    """A random free port of this machine.

    Raises:
        ConfigError: none found.
    """
    chooser = random.SystemRandom()  # not the run's seed: two runs of one seed would meet at one port
    for _ in range(tries):
        port = chooser.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port between {_PORTS.start} and {_PORTS.stop}; set MASTER_PORT to one")


def choose_port() -> None:
    """Set MASTER_PORT for the processes that this one will start, unless a launcher or the user has set it."""
    if "LOCAL_RANK" not in os.environ:
        os.environ.setdefault("MASTER_PORT", str(free_port()))
