"""A real PostgreSQL, a real MLflow server on it, and a proxy that loses answers."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plugins.strategies.ports import free_port


def postgres_programs() -> Path | None:
    """Folder of initdb and pg_ctl: in PATH, or where Debian puts them."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A new cluster on a Unix socket, as long as the block; yields its address for SQLAlchemy."""
    programs = postgres_programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path is short
    as_user: list[str] = []
    if os.getuid() == 0:  # PostgreSQL refuses to be root
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = ["runuser", "-u", "postgres", "--"]
    data, control = folder / "data", [*as_user, str(programs / "pg_ctl"), "-D", str(folder / "data")]
    quiet: dict[str, Any] = {"cwd": "/", "check": True, "stdout": subprocess.DEVNULL, "timeout": 120}
    subprocess.run(
        [*as_user, str(programs / "initdb"), "-D", str(data), "-A", "trust", "-U", "postgres", "--no-sync"], **quiet
    )
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    subprocess.run([*control, "-o", options, "-l", str(folder / "log"), "-w", "start"], **quiet)
    try:
        yield f"postgresql+psycopg2://postgres@/postgres?host={folder}"
    finally:
        subprocess.run([*control, "-m", "immediate", "-w", "stop"], **quiet)
        shutil.rmtree(folder, ignore_errors=True)


class MLflowServer:
    """`mlflow server` with one worker. `kill` is SIGKILL to all of it; `start` brings it back on the same port."""

    def __init__(self, database: str, folder: Path):
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._command = [
            str(Path(sys.executable).parent / "mlflow"), "server", "--workers", "1", "--host", "127.0.0.1",
            "--port", str(self.port), "--backend-store-uri", database, "--artifacts-destination", str(folder / "art"),
        ]  # fmt: skip
        self._environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to start; `wait` waits for it."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self.folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, seconds: float = 240) -> None:
        """Until it answers."""
        assert self._process is not None
        give_up = time.monotonic() + seconds
        while not self.answers():
            assert self._process.poll() is None and time.monotonic() < give_up, (
                self.folder / "server.log"
            ).read_text()[-3000:]
            time.sleep(0.1)
        self._remember_worker()

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
        except (OSError, urllib.error.URLError):
            return False
        return True

    def _remember_worker(self) -> None:
        """The command line wrapper imports all of MLflow a second time, for 7 s of CPU: a restart does without it."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        pids = children.read_text().split() if children.exists() else []
        for pid in pids:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
            if b"uvicorn" in words:
                pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")[:-1]
                self._environment = dict(pair.decode().split("=", 1) for pair in pairs)
                self._command = [word.decode() for word in words]

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class LossyProxy:
    """Passes HTTP requests on, one a connection. While `lose` names a part of a path, such requests reach the server
    and are carried out, but their answer never comes back.

    Attributes:
        lost: paths of the requests whose answer was thrown away.
    """

    def __init__(self, port: int):
        self._target = port
        self.lose = ""
        self.lost: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, socket.create_connection(("127.0.0.1", self._target)) as server:
            request = _read_request(connection)
            if not request:
                return
            server.sendall(request)
            answer = b""
            while chunk := server.recv(65536):
                answer += chunk
            path = request.split(b" ", 2)[1].decode()
            if self.lose and self.lose in path:
                self.lost.append(path)
                return
            connection.sendall(answer)


def _read_request(connection: socket.socket) -> bytes:
    """One request, told to close the connection after it, so that the end of the answer is the end of the stream."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        if not chunk:
            return b""
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n" + body
