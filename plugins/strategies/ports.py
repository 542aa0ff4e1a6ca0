"""A port for the processes of a run to meet at."""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

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
    """Set MASTER_PORT for the processes that this one will start, unless the user has set it; under torchrun, agree."""
    if "LOCAL_RANK" not in os.environ:
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        meet_anew(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def meet_anew(rank: int, world_size: int, timeout_seconds: float = 300.0) -> None:
    """Give the processes of this start of a torchrun job a meeting place that no earlier start has used.

    torchrun's agents keep one store for all restarts (torch 2.13), in which the addresses of dead processes are still
    written: a restarted process group would connect to those, and fail. Nor do the agents of several nodes count
    restarts alike. So rank 0 opens a port, and tells it to each process under a word that this process has just made
    up; what is left from before answers to other words. Sets MASTER_ADDR and MASTER_PORT.

    Raises:
        ConfigError: the processes did not find each other in time.
    """
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_seconds))
    deadline = time.monotonic() + timeout_seconds
    word = uuid.uuid4().hex
    store.set(f"scalewright/word/{rank}", word)
    if rank == 0:
        _answer_all(store, word, f"{_address_towards(host, port)} {free_port()}", world_size, deadline)
    _wait(store, f"scalewright/place/{word}", deadline)
    address, new_port = store.get(f"scalewright/place/{word}").decode().split()
    store.set(f"scalewright/came/{address}/{new_port}/{rank}", "yes")
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=new_port, TORCHELASTIC_USE_AGENT_STORE="False")


def _answer_all(store: Any, own_word: str, place: str, world_size: int, deadline: float) -> None:
    """Tell `place` to whoever asks, until all processes of this start have got it."""
    store.set(f"scalewright/place/{own_word}", place)
    missing = set(range(1, world_size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"scalewright/came/{place.replace(' ', '/')}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"scalewright/word/{rank}"]):
                store.set(f"scalewright/place/{store.get(f'scalewright/word/{rank}').decode()}", place)
        if time.monotonic() > deadline:
            raise ConfigError(f"ranks {sorted(missing)[:8]} of this job did not come; look at their output")
        time.sleep(0.02)


def _wait(store: Any, key: str, deadline: float) -> None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise ConfigError("rank 0 of this job did not come; look at its output")
        time.sleep(0.02)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
        except OSError:
            return host
