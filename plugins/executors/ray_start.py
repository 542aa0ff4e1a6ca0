"""Starting Ray: a cluster that is already there (RAY_ADDRESS), or processes of this machine's own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.errors import ConfigError

# Ray reads these when it is imported or started.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
_CONNECT_SECONDS = 20.0
_START_ATTEMPTS = 5
_SETTINGS = 4  # type of an HTTP/2 frame


def code_environment(packages: tuple[str, ...]) -> dict[str, Any]:
    """What Ray's runtime_env needs to bring packages of this checkout to every node: nothing has to be installed there
    but the dependencies."""
    root = Path(__file__).resolve().parents[2]
    return {
        "py_modules": [str(root / name) for name in packages],
        "excludes": ["**/__pycache__", "*.pyc"],
    }


def start_ray(cores: int, object_store_bytes: int, runtime_env: dict[str, Any], code: dict[str, Any]) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start a Ray of this machine's own.

    Args:
        cores: CPUs of a Ray of this machine's own; a cluster keeps its own count.
        object_store_bytes: of a Ray of this machine's own.
        code: further entries of runtime_env where a cluster has to be brought the code.

    Raises:
        ConfigError: no cluster answers, or Ray did not start in several attempts.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        _start_here(cores, {**common, "object_store_memory": object_store_bytes, "runtime_env": runtime_env})
        return
    _check_answers(address)
    try:
        ray.init(address=address, runtime_env={**runtime_env, **code}, **common)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"RAY_ADDRESS {address}: no Ray cluster answers ({_short(error)})") from None


def _start_here(cores: int, options: dict[str, Any]) -> None:
    """A Ray of this machine's own. Ray gives its first process 30 s, which a busy machine may need more than once.

    Raises:
        ConfigError: it did not start in several attempts.
    """
    import ray

    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            with _sigterm_blocked():
                ray.init(address="local", num_cpus=cores, include_dashboard=False, **options)
            return
        except Exception as error:  # Ray raises no narrower one
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            print(f"Ray did not start in time (attempt {attempt} of {_START_ATTEMPTS})", file=sys.stderr, flush=True)
    raise ConfigError(
        "Ray did not start on this machine: it is too busy or has too little memory; when it is quieter, start the same"
        " command again (a sweep: with --resume)"
    )


def _check_answers(address: str) -> None:
    """Ray itself would wait for ever for an address that nobody answers, or something that is no Ray."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # auto and the like
    end = time.monotonic() + _CONNECT_SECONDS
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS) as connection:
            if not os.environ.get("RAY_USE_TLS"):
                _greet(connection, end)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"RAY_ADDRESS {address}: no Ray cluster answers ({_short(error)})") from None


def _greet(connection: socket.socket, end: float) -> None:
    """Say hello as gRPC does, which Ray speaks: HTTP/2's preface and empty settings; the server's settings come back.

    RFC 9113, sections 3.4 and 4.1.

    Raises:
        OSError: something else comes back, or nothing in time.
    """
    connection.settimeout(max(0.1, end - time.monotonic()))
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0]))
    answer = b""
    while len(answer) < 9 and (part := connection.recv(9 - len(answer))):
        answer += part
        connection.settimeout(max(0.1, end - time.monotonic()))
    if len(answer) < 9 or answer[3] != _SETTINGS:
        raise OSError("what listens there does not speak gRPC")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Processes started inside never see SIGTERM, as Ray's own never see SIGINT: batch systems and `timeout` send it to
    the whole group, and a driver whose Ray died first could no longer mark what was cut off. Ray ends them by SIGKILL.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
